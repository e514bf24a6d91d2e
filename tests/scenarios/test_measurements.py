"""The published rows: whole, consistent with their scenarios, and used as said."""

from __future__ import annotations

import pytest

from exatwin.scenarios.measurements import (
    MIB,
    measured_collectives,
    measured_run,
    measured_runs,
    measured_stage_memory,
)
from exatwin.scenarios.scenario import load_scenario, scenario_names
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine

ASKED = [run for run in measured_runs() if run.scenario]


@pytest.mark.parametrize("run", ASKED, ids=[run.id for run in ASKED])
def test_a_row_and_its_scenario_agree(run):
    scenario = run.ask()
    assert run.devices in (None, scenario.devices)
    if run.step_s and run.tokens_per_s:
        assert scenario.tokens_per_step / run.step_s == pytest.approx(run.tokens_per_s, rel=2e-3)


@pytest.mark.parametrize("run", [run for run in ASKED if run.step_s and run.tflops_hardware], ids=lambda run: run.id)
def test_a_rate_is_the_step_in_the_sources_own_formula(run):
    """24 f B s l h^2 (1 + s/6h + V/16lh) a device, f = 4 where activations are recomputed."""
    scenario = run.ask()
    model, training, layout = scenario.model, scenario.training, scenario.layout
    s, h, v = training.seq_len, model.hidden, model.padded_vocab(layout.tp)
    f = 4 if layout.recompute == "full" else 3
    flop = 24 * f * training.global_batch * s * model.layers * h**2 * (1 + s / (6 * h) + v / (16 * model.layers * h))
    rate = flop / run.step_s / scenario.devices / 1e12
    assert rate == pytest.approx(run.tflops_hardware, rel=0.015)


def test_no_row_is_above_the_peak_of_its_device():
    for run in ASKED:
        scenario = run.ask()
        if run.tflops_hardware:
            assert run.tflops_hardware * 1e12 < scenario.machine.device.peak_flop_per_s(scenario.training.precision)


def test_rows_are_used_as_the_accuracy_page_says():
    use = {run.id: run.use for run in measured_runs()}
    assert {name for name in use if use[name] == "fit"} == {
        "lumi-175b-128gcd",
        "lumi-7b-32gcd",
        "fugaku-30b-082",
        "fugaku-30b-086",
    }
    assert {name for name in use if use[name] == "unseen"} == {
        "lumi-175b-256gcd",
        "lumi-175b-2048gcd",
        "lumi-33b-64gcd",
        "frontier-ornl22b-16gcd-001",
        "frontier-dash-175b-weak-1024",
        "frontier-dash-1t-weak-3072",
        *(f"fugaku-30b-{number:03}" for number in (77, 83, 84, 85, 87)),
    }


def test_ids_are_unique_and_every_row_says_where_it_stands():
    runs = measured_runs()
    assert len({run.id for run in runs}) == len(runs)
    assert all(run.source and run.where and run.note for run in runs)
    assert all(run.scenario == "" or run.scenario in scenario_names() for run in runs)


def test_what_a_scenario_is_measured_against_exists_and_asks_the_same():
    for name in scenario_names():
        scenario = load_scenario(name)
        if scenario.measured:
            run = measured_run(scenario.measured)
            assert run.ask().layout == scenario.layout
    with pytest.raises(InputError, match="did you mean lumi-175b-128gcd"):
        measured_run("lumi-175b-128gc")


def test_the_corrected_logs_say_so():
    for name in ("frontier-ornl22b-16gcd-001", "crusher-ornl175b-128gcd"):
        assert "factor of four" in measured_run(name).note


def test_stage_memory_is_ordered_and_fits_the_device():
    capacity = load_machine("frontier").device.memory_bytes
    rows = measured_stage_memory()
    assert [(row.run, row.stage, row.max_allocated_bytes / MIB) for row in rows][:2] == [
        ("lumi-175b-128gcd", 0, 48803),
        ("lumi-175b-128gcd", 1, 45178),
    ]
    assert len({(row.run, row.stage) for row in rows}) == len(rows) == 33
    for row in rows:
        assert 0 <= row.stage < measured_run(row.run).ask().layout.pp
        assert row.max_allocated_bytes < (row.reserved_bytes or row.max_allocated_bytes + 1) < capacity
        assert row.allocated_bytes is None or row.allocated_bytes < row.max_allocated_bytes


def test_timed_collectives_have_a_size_a_group_and_a_least_time():
    rows = measured_collectives()
    assert len(rows) == 60
    for row in rows:
        assert 0 < row.min_s <= row.median_s and row.calls > 0 and row.size_bytes > 0
        if row.group == "dp":
            assert row.ranks == row.ask().layout.dp
    dp32 = next(row for row in rows if row.nodes == 256 and row.size_bytes == 2931315179)
    assert dp32.median_s == pytest.approx(1.1437, abs=1e-3)
