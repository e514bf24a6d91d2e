"""Calibrations: whole, sourced, for machines that exist, and refused where they are wrong."""

from __future__ import annotations

import copy
import math

import pytest
import yaml

from exatwin.sim.calibration import (
    Calibration,
    Fit,
    Residual,
    calibration_document,
    calibration_names,
    default_calibration,
    load_calibration,
)
from exatwin.topology.errors import InputError
from exatwin.topology.facts import facts_in
from exatwin.topology.machine import load_machine, machine_names

every_calibration = pytest.mark.parametrize("name", calibration_names())


@every_calibration
def test_a_bundled_calibration_is_called_as_its_file_and_belongs_to_machines_that_exist(name):
    """To none where it is of another software on a machine that has one; scenarios name it then."""
    calibration = load_calibration(name)
    assert calibration.name == name
    assert set(calibration.machines) <= set(machine_names())


@every_calibration
def test_a_calibration_was_measured_on_the_device_of_its_machines(name):
    calibration = load_calibration(name)
    assert all(load_machine(machine).device.name == calibration.device for machine in calibration.machines)
    assert calibration.device in {load_machine(machine).device.name for machine in machine_names()}


@pytest.mark.parametrize("name", machine_names())
def test_each_machine_has_one_calibration(name):
    machine = load_machine(name)
    chosen = default_calibration(machine)
    assert [n for n in calibration_names() if name in load_calibration(n).machines] == [chosen.name]
    assert set(chosen.compute.gemm_fraction) <= set(machine.device.peak)


@every_calibration
def test_every_figure_has_a_source_and_every_guess_says_what_it_rests_on(name):
    facts = dict(facts_in(load_calibration(name)))
    assert len(facts) >= 17
    assert all(fact.source for fact in facts.values())
    assert all(fact.note for fact in facts.values() if fact.assumed)


@every_calibration
def test_a_fitted_figure_is_named_in_the_fit_and_no_other_is(name):
    calibration = load_calibration(name)
    elsewhere = "rows of the fit of"  # the same software on the same device
    fitted = {p for p, f in facts_in(calibration) if f.source == "exatwin-fit" and not f.at.startswith(elsewhere)}
    fits = [fit for fit in (calibration.fit, calibration.benchmark_fit) if fit]
    named = [parameter for fit in fits for parameter in fit.parameters]
    assert all(any(path.startswith(parameter) for parameter in named) for path in fitted)
    assert all(any(path.startswith(parameter) for path in fitted) for parameter in named)


def test_a_machine_without_a_calibration_is_told_to_give_one():
    machine = load_machine("frontier").model_copy(update={"name": "mine"})
    with pytest.raises(InputError, match="no calibration is bundled for machine mine; give one with --calibration"):
        default_calibration(machine)


# The interval of a step


def with_residuals(*errors, figures=1):
    residuals = [Residual(row=str(i), error=error) for i, error in enumerate(errors)]
    fit = Fit(parameters=["compute"] * figures, command="", residuals=residuals)
    return load_calibration("mi250x-rccl").model_copy(update={"fit": fit})


@pytest.mark.parametrize(
    ("errors", "figures", "t"),
    [
        ((0.01, -0.01), 1, 3.078),
        ((0.03, 0.0, -0.03), 1, 1.886),
        ((0.03, 0.0, -0.03), 2, 3.078),
        ((0.02, -0.01, 0.03, 0.01), 1, 1.638),
        ((0.01,) * 11, 1, 1.372),
    ],
)
def test_the_spread_is_students_80_percent_of_what_a_fit_left_over(errors, figures, t):
    freedom = len(errors) - figures
    deviation = math.sqrt(sum(error**2 for error in errors) / freedom)
    expected = t * deviation * math.sqrt(1 + 1 / len(errors))
    assert with_residuals(*errors, figures=figures).relative_spread() == pytest.approx(expected)


def test_the_points_of_students_distribution_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 11):
        rows = freedom + 1
        spread = with_residuals(*[1.0] * rows).relative_spread() / math.sqrt(rows / freedom) / math.sqrt(1 + 1 / rows)
        assert spread == pytest.approx(stats.t.ppf(0.9, freedom), abs=5e-4)


def test_more_rows_of_the_same_error_narrow_the_interval():
    spreads = [with_residuals(*[0.01] * n).relative_spread() for n in range(2, 30)]
    assert spreads == sorted(spreads, reverse=True)


def test_a_fit_of_as_many_figures_as_rows_says_nothing_of_the_error():
    assert load_calibration("h200-nccl").relative_spread() is None
    assert with_residuals().relative_spread() is None
    assert with_residuals(0.0, 0.0, figures=2).relative_spread() is None
    assert load_calibration("mi250x-rccl").relative_spread() > 0


# Files that are wrong

GOOD, _ = calibration_document("mi250x-rccl")
GONE = object()


def saved(tmp_path, change):
    """A copy of a bundled file with the values at some dotted paths replaced, or gone."""
    document = copy.deepcopy(GOOD)
    for path, value in change.items():
        *way, last = path.split(".")
        place = document
        for key in way:
            place = place[key]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


def figure(value):
    return {"value": value, "source": "assumed", "note": "A test."}


def test_a_copy_of_a_bundled_file_is_read_alike(tmp_path):
    assert load_calibration(saved(tmp_path, {})) == load_calibration("mi250x-rccl")


def test_a_file_of_ones_own_keeps_its_figures_though_it_is_called_as_a_bundled_one_with_a_fit(tmp_path):
    mine = load_calibration(saved(tmp_path, {"compute.sustained": figure(0.5)}))
    assert mine.name == "mi250x-rccl"
    assert mine.compute.sustained.value == 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "colour"),
        ({"compute.gemm_fractoin": {}}, "gemm_fractoin"),
        ({"compute.memory_fraction": GONE}, "compute.memory_fraction"),
        ({"network": GONE}, "network"),
        ({"network.base.value": 17}, "has no unit"),
        ({"network.base.value": "17 GB"}, "unknown unit 'GB'"),
        ({"network.base.value": "-17 us"}, "must be finite and not negative"),
        ({"memory.context": figure("1 GB/s")}, "unknown unit"),
        ({"compute.memory_fraction": 0.8}, "needs its source"),
        ({"compute.memory_fraction": {"value": 0.8, "source": "assumed"}}, "needs a note"),
        ({"compute.memory_fraction": figure("most")}, "compute.memory_fraction"),
        ({"compute.gemm_fraction": {"fp12": figure(0.5)}}, "fp12"),
        ({"compute.gemm_tile.rows": figure(12.5)}, "compute.gemm_tile.rows"),
        ({"fit.residuals": [{"row": "x"}]}, "fit.residuals"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_field(tmp_path, change, said):
    file = saved(tmp_path, change)
    with pytest.raises(InputError) as caught:
        load_calibration(file)
    assert said in str(caught.value)
    assert caught.value.where == file


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compute.gemm_fraction.fp16", 0.0),
        ("compute.gemm_fraction.fp16", -0.5),
        ("compute.gemm_fraction.fp16", math.nan),
        ("compute.gemm_fraction.fp16", 50.0),
        ("compute.attention.forward.share", 0.0),
        ("compute.attention.backward.fill", -1.0),
        ("compute.memory_fraction", 0.0),
        ("compute.gemm_tile.rows", 0),
        ("compute.gemm_tile.columns", -1),
        ("compute.gemm_tile.units", 0),
        ("compute.gemm_tile.k_half", -1e9),
        ("network.node_ring", 0.0),
        ("network.fabric_ring", -1.0),
        ("network.node_point_to_point", math.inf),
        ("network.fabric_point_to_point", 0.0),
    ],
)
def test_a_share_that_no_device_or_link_can_have_is_refused(tmp_path, field, value):
    """Nothing at all, less than nothing, or many times what the vendor printed."""
    with pytest.raises(InputError, match=field.rpartition(".")[2]):
        load_calibration(saved(tmp_path, {field: figure(value)}))


@pytest.mark.parametrize("name", ["mi250x", "nothing-like-it", "no/such/file.yaml"])
def test_an_unknown_calibration_is_refused(name):
    with pytest.raises(InputError):
        load_calibration(name)


def test_a_calibration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_calibration("a100-nccl").name = "other"
    assert isinstance(load_calibration("a100-nccl"), Calibration)
