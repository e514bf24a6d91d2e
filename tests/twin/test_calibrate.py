"""Fits: what ships is what fitting finds again, from the rows that a rule chose, and a fit changes nothing else."""

from __future__ import annotations

from functools import cache

import pytest

from exatwin.sim.calibration import calibration_names, calibration_with, load_calibration
from exatwin.topology.errors import InputError
from exatwin.topology.facts import facts_in
from exatwin.twin.calibrate import RECIPES, Figure, Recipe, fit, fit_rows_of, with_figures

pytest.importorskip("scipy")

RECIPE = {recipe.calibration: recipe for recipe in RECIPES}
SMALL = ("mi250x-rccl", "a64fx-tofud")  # two rows each; the others are fitted by `make calibrate` alone
SHIPPED = [name for name in RECIPE if load_calibration(name).fit]
fitted = cache(lambda name: fit(RECIPE[name]))
every_recipe = pytest.mark.parametrize("name", RECIPE)
every_shipped = pytest.mark.parametrize("name", SHIPPED)
small_recipes = pytest.mark.parametrize("name", SMALL)


def facts(calibration):
    return dict(facts_in(calibration))


@small_recipes
def test_a_fit_finds_the_figures_that_ship(name):
    shipped = facts(load_calibration(name))
    for figure, found in zip(RECIPE[name].figures, fitted(name).values, strict=True):
        assert found == pytest.approx(shipped[figure.path].value, rel=0.005)


@small_recipes
def test_what_a_fit_leaves_is_what_ships_with_it(name):
    errors = fitted(name).errors
    for residual in load_calibration(name).fit.residuals:
        assert errors[residual.row] == pytest.approx(residual.error, abs=5e-4)


@every_shipped
def test_what_ships_was_fitted_on_the_rows_that_are_marked_for_it(name):
    rows = [row.id for row in fit_rows_of(name)]
    assert [residual.row for residual in load_calibration(name).fit.residuals] == rows


@every_shipped
def test_what_ships_names_the_figures_of_its_recipe_and_keeps_their_bounds(name):
    shipped = load_calibration(name)
    assert list(shipped.fit.parameters) == [figure.path for figure in RECIPE[name].figures]
    for figure in RECIPE[name].figures:
        value = facts(shipped)[figure.path].value
        least, most = (
            facts(calibration_with(name, {figure.path: figure.told(bound)}))[figure.path].value
            for bound in (figure.least, figure.most)
        )
        assert least <= value <= most


@every_recipe
def test_each_recipe_has_at_least_one_row_for_each_of_its_figures(name):
    assert name in calibration_names()
    assert len(list(fit_rows_of(name))) >= len(RECIPE[name].figures)


@every_recipe
def test_a_fit_moves_its_own_figures_alone(name):
    recipe = RECIPE[name]
    before, after = facts(calibration_with(name, {})), facts(with_figures(recipe, [f.start for f in recipe.figures]))
    moved = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert moved <= {figure.path for figure in recipe.figures}
    assert {after[figure.path].source for figure in recipe.figures} == {"exatwin-fit"}


def test_a_row_that_was_left_out_is_still_met_to_a_few_percent():
    left_out = fitted("mi250x-rccl").left_out
    assert set(left_out) == set(fitted("mi250x-rccl").errors)
    assert all(abs(error) < 0.05 for error in left_out.values())
    assert fitted("a64fx-tofud").left_out is None  # two figures, two rows


def test_a_figure_is_written_as_its_calibration_says_it():
    assert Figure("step.dispatch", 0.0, 500.0, 30.0, "us").told(12.3456789) == "12.3457 us"
    assert Figure("compute.sustained", 0.2, 1.0, 0.9).told(0.123456789) == 0.123457


@small_recipes
def test_a_fit_is_written_as_the_file_that_is_read(name):
    document = fitted(name).document()
    again = facts(calibration_with(name, document["figures"]))
    for figure, value in zip(RECIPE[name].figures, fitted(name).values, strict=True):
        assert again[figure.path].value == pytest.approx(value, rel=1e-5)
    assert [entry["row"] for entry in document["residuals"]] == list(fitted(name).errors)


def test_a_calibration_without_rows_to_fit_on_is_told_so():
    with pytest.raises(InputError, match="mi300x-rccl: no published row is marked for a fit of it"):
        fit(Recipe("mi300x-rccl", (Figure("compute.sustained", 0.1, 1.0, 0.9),)))
