"""The published runs: each line a whole scenario, used by the rule, and consistent with itself."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from exatwin.scenarios.layout import Layout
from exatwin.scenarios.model import Model
from exatwin.scenarios.published import (
    FITTED_ELSEWHERE,
    MOST_FIT,
    asked_runs,
    fit_rows,
    left_out,
    published_runs,
    series_names,
)
from exatwin.scenarios.training import Training
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine, machine_names

RUNS = published_runs()
each_series = pytest.mark.parametrize("series", series_names())


def test_every_run_stands_once_and_none_is_both_used_and_left_out():
    ids = Counter([run.id for run in RUNS] + [item.id for item in left_out()])
    assert [name for name, count in ids.items() if count > 1] == []
    assert all(item.reason for item in left_out())


@each_series
def test_the_fields_of_a_line_are_those_of_a_scenario(series):
    """Whatever the rules that join them say: model, training and layout are valid by themselves."""
    for run in published_runs(series):
        for kind, part in ((Model, "model"), (Training, "training"), (Layout, "layout")):
            try:
                kind.model_validate(run.fields[part])
            except ValidationError as error:
                pytest.fail(f"{run.id}: {part}: {error}")


@each_series
def test_degrees_multiply_to_the_devices_and_the_batch_is_whole(series):
    for run in published_runs(series):
        layout, training = run.fields["layout"], run.fields["training"]
        tp, pp, cp = (layout.get(name, 1) for name in ("tp", "pp", "cp"))
        assert tp * pp * cp * layout["dp"] == run.fields["devices"], run.id
        assert training["global_batch"] % (layout["dp"] * layout["micro_batch"]) == 0, run.id


def test_the_rows_that_fits_may_see_are_those_of_the_rule():
    assert {run.id for run in RUNS if run.use == "fit"} == fit_rows(RUNS)


def test_a_pool_never_gives_more_than_half_of_its_rows_nor_more_than_twenty():
    pools = Counter(run.pool for run in RUNS if run.use != "context")
    fitted = Counter(run.pool for run in RUNS if run.use == "fit")
    assert max(fitted.values()) <= MOST_FIT
    for pool, count in fitted.items():
        assert count <= pools[pool] / 2
        assert pool[0] not in FITTED_ELSEWHERE


def test_a_row_of_context_says_why():
    assert [run.id for run in RUNS if run.use == "context" and not run.note] == []


def test_rows_of_one_group_differ_in_their_layout_alone():
    first = {}
    layouts = {}
    for run in RUNS:
        if run.group:
            rest = {key: value for key, value in run.fields.items() if key not in ("layout", "name")}
            assert first.setdefault(run.group, rest) == rest, run.id
            layouts.setdefault(run.group, []).append(run.fields["layout"])
    assert all(len({str(layout) for layout in members}) >= 3 for members in layouts.values())


@pytest.mark.parametrize("series", ["narayanan-2021", "mt-nlg", "bigscience-bloom", "alcf-auroragpt"])
def test_a_printed_rate_and_the_step_agree(series):
    """Narayanan's formula counts 4 passes where activations are recomputed; ALCF counts 6N and the attention."""
    for run in published_runs(series):
        if run.step_s is None or run.tflops is None:
            continue
        model, training = run.fields["model"], run.fields["training"]
        s, h, layers, v = training["seq_len"], model["hidden"], model["layers"], model["vocab"]
        if run.flop_convention == "megatron-hardware":
            flop = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        elif run.flop_convention == "6n-attention":
            keys = model.get("kv_heads", model["heads"]) / model["heads"]
            weights = layers * (2 * h**2 * (1 + keys) + 3 * h * model["ffn"]) + 2 * v * h
            flop = s * (6 * weights + 12 * layers * h * s)
        else:
            continue
        rate = flop * training["global_batch"] / run.step_s / run.fields["devices"] / 1e12
        assert rate == pytest.approx(run.tflops, rel=0.04), run.id


def test_no_rate_is_above_the_peak_of_its_device():
    for run in RUNS:
        if run.tflops is not None and run.fields["machine"] in machine_names():
            device = load_machine(run.fields["machine"]).device
            precision = run.fields["training"]["precision"]
            if precision in device.peak:
                assert run.tflops * 1e12 < device.peak_flop_per_s(precision), run.id


@each_series
def test_a_line_can_be_asked_or_names_what_is_not_simulated(series):
    """A line that breaks another rule is a line that was copied wrongly."""
    for run in published_runs(series):
        try:
            scenario = run.ask()
        except InputError as error:
            assert "not simulated" in str(error) or "is bundled" in str(error) or "whole number of nodes" in str(error)
        else:
            assert scenario.devices == run.fields["devices"]


def test_runs_come_with_their_scenarios():
    first, scenario = next(asked_runs("narayanan-2021"))
    assert (first.series, scenario.name, scenario.devices) == ("narayanan-2021", first.id, 32)


def test_an_unknown_series_names_the_nearest():
    with pytest.raises(InputError, match="did you mean vtrain"):
        published_runs("vtrian")
