"""Fits: what ships is what fitting finds again, and a fit changes nothing else."""

from __future__ import annotations

from functools import cache

import pytest

from exatwin.scenarios.measurements import measured_run
from exatwin.sim.calibration import load_calibration
from exatwin.topology.errors import InputError
from exatwin.topology.facts import facts_in
from exatwin.twin.calibrate import RECIPES, Recipe, fit, with_figures

pytest.importorskip("scipy")

RECIPE = {recipe.calibration: recipe for recipe in RECIPES}
fitted = cache(lambda name: fit(RECIPE[name]))
every_recipe = pytest.mark.parametrize("name", RECIPE)


def value(calibration, path):
    return dict(facts_in(calibration))[path.removesuffix(".value")].value


@pytest.mark.parametrize(("name", "within"), [("mi250x-rccl", 0.005), ("a64fx-tofud", 0.01)])
def test_a_fit_finds_the_figures_that_ship(name, within):
    shipped = load_calibration(name)
    for paths, found in zip(RECIPE[name].figures, fitted(name).values, strict=True):
        for path in paths:
            assert found == pytest.approx(value(shipped, path), rel=within)


@every_recipe
def test_a_fit_sees_the_rows_that_are_marked_for_it_and_leaves_what_ships_says(name):
    shipped = load_calibration(name)
    errors = fitted(name).errors
    assert set(errors) == {residual.row for residual in shipped.fit.residuals}
    assert all(measured_run(row).use == "fit" for row in errors)
    for residual in shipped.fit.residuals:
        assert errors[residual.row] == pytest.approx(residual.error, abs=5e-4)


@every_recipe
def test_a_fit_moves_its_own_figures_alone(name):
    before, after = dict(facts_in(load_calibration(name))), dict(facts_in(fitted(name).calibration))
    free = {path.removesuffix(".value") for paths in RECIPE[name].figures for path in paths}
    assert {path for path in before if before[path] != after[path]} <= free


@every_recipe
def test_the_fitted_figures_are_those_the_file_says(name):
    named = load_calibration(name).fit.parameters
    free = [path for paths in RECIPE[name].figures for path in paths]
    assert all(any(path.startswith(parameter) for parameter in named) for path in free)


def test_a_row_that_was_left_out_is_still_met_to_a_few_percent():
    left_out = fitted("mi250x-rccl").left_out
    assert set(left_out) == set(fitted("mi250x-rccl").errors)
    assert all(abs(error) < 0.03 for error in left_out.values())
    assert fitted("a64fx-tofud").left_out is None  # two figures, two rows


def test_figures_that_share_a_value_move_together():
    recipe = RECIPE["mi250x-rccl"]
    changed = with_figures(load_calibration("mi250x-rccl"), recipe, [0.25])
    assert {value(changed, path) for path in recipe.figures[0]} == {0.25}


def test_a_calibration_without_rows_to_fit_on_is_told_so():
    with pytest.raises(InputError, match="no published row is marked fit for dgx-h100"):
        fit(Recipe("h100-nccl", (("compute.gemm_fraction.bf16.value",),), ((0.1, 1.0),)))
