"""Every schedule and every way to share states and hide communication, played whole on a machine."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.calibration import default_calibration
from exatwin.sim.predict import FIDELITIES, predict
from exatwin.sim.traffic import build_traffic

from ..answers import numbers

SMALL = ["training.global_batch=64", "framework=megatron-core"]
BOTH = ["layout.overlap_grad_reduce=true", "layout.overlap_param_gather=true"]
LAYOUTS = {
    "interleaved": ["layout={tp: 1, pp: 4, vpp: 2, zero: 1}"],
    "interleaved gpipe": ["layout={tp: 1, pp: 4, vpp: 2, zero: 1, schedule: gpipe}"],
    "interleaved on two ranks": ["layout={tp: 2, pp: 2, vpp: 4, zero: 0}"],
    "zb-h1": ["layout={tp: 1, pp: 4, schedule: zb-h1}"],
    "zb-v": ["layout={tp: 2, pp: 4, vpp: 2, schedule: zb-v}"],
    "dualpipe-v": ["layout={tp: 1, pp: 4, vpp: 2, schedule: dualpipe-v}"],
    "overlap": ["layout={tp: 2, zero: 1}", *BOTH],
    "overlap in a pipeline": ["layout={tp: 1, pp: 4, zero: 1}", *BOTH],
    "overlap in an interleaved pipeline": ["layout={tp: 1, pp: 2, vpp: 2, zero: 1}", *BOTH],
    "overlap under zb-v": ["layout={tp: 1, pp: 2, vpp: 2, zero: 1, schedule: zb-v}", *BOTH],
    "context parallel": ["layout={tp: 2, cp: 2, zero: 1}", *BOTH],
}


@cache
def answer(name, fidelity="des"):
    return predict(load_scenario("h100-llama-3-8b", [*SMALL, *LAYOUTS[name]]), fidelity=fidelity)


every_layout = pytest.mark.parametrize("name", LAYOUTS)


@every_layout
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_layout_gets_a_whole_answer_at_every_fidelity(name, fidelity):
    found = answer(name, fidelity)
    values = numbers({key: value for key, value in dataclasses.asdict(found).items() if key != "scenario"})
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert found.breakdown_s.total == pytest.approx(found.step_s, rel=1e-9)
    for record in found.comm:
        assert record.exposed_s <= record.busy_s * (1 + 1e-12)


@every_layout
def test_the_fidelities_agree_on_a_layout(name):
    """Links are shared by messages that pass each other, so not to the last digit; the closed form waits for nobody."""
    exact = answer(name, "des-exact").step_s
    assert answer(name, "des-per-rank").step_s == pytest.approx(exact, rel=1e-9)
    assert answer(name, "des").step_s == pytest.approx(exact, rel=1e-3)
    assert answer(name, "recurrence").step_s == pytest.approx(exact, rel=5e-3)
    assert answer(name, "screen").step_s == pytest.approx(exact, rel=0.06)


def step_s(*options):
    return predict(load_scenario("h100-llama-3-8b", [*SMALL, *options])).step_s


def test_what_hides_communication_shortens_a_step_by_no_more_than_the_communication():
    plain = predict(load_scenario("h100-llama-3-8b", [*SMALL, *LAYOUTS["overlap"][:1]]))
    hidden = answer("overlap")
    shorter = plain.step_s - hidden.step_s
    assert 0 < shorter <= plain.breakdown_s.dp_comm
    assert hidden.breakdown_s.dp_comm < plain.breakdown_s.dp_comm
    assert hidden.breakdown_s.compute >= plain.breakdown_s.compute  # which runs beside it


def test_more_chunks_a_rank_leave_a_shorter_bubble_and_send_more():
    bubbles, sent = [], []
    for vpp in (1, 2, 4):
        found = predict(load_scenario("h100-llama-3-8b", [*SMALL, f"layout={{tp: 1, pp: 4, vpp: {vpp}, zero: 1}}"]))
        bubbles.append(found.breakdown_s.bubble)
        sent.append(next(record.bytes for record in found.comm if record.group == "pp"))
    assert bubbles == sorted(bubbles, reverse=True)
    assert sent == sorted(sent)


def test_a_step_with_little_bubble_is_shorter_than_one_with_much():
    steps = [
        step_s(f"layout={{tp: 1, pp: 4, vpp: {vpp}, schedule: {schedule}}}")
        for schedule, vpp in (("gpipe", 1), ("zb-h1", 1), ("zb-v", 2))
    ]
    assert max(steps[1:]) < steps[0]


def test_the_two_copies_of_a_tied_embedding_on_one_rank_are_one():
    tied = ["model.tied=true", *SMALL]
    looped = load_scenario("h100-llama-3-8b", [*tied, "layout={tp: 1, pp: 4, vpp: 2}"])
    folded = load_scenario("h100-llama-3-8b", [*tied, "layout={tp: 1, pp: 4, vpp: 2, schedule: zb-v}"])
    calibration = default_calibration(looped.machine)
    assert build_traffic(looped, calibration).lanes[0].embedding
    assert not build_traffic(folded, calibration).lanes[0].embedding


def test_replicas_that_keep_one_pace_are_disturbed_together():
    """A slow device holds up the other of its context-parallel group in every pass, and so their whole pipeline."""
    options = [*SMALL, "layout={tp: 1, cp: 2, zero: 1}"]
    scenario = load_scenario("h100-llama-3-8b", [*options, "perturb={devices: [{rank: 3, speed: 0.5}]}"])
    traffic = build_traffic(scenario, default_calibration(scenario.machine))
    assert [lane.replicas for lane in traffic.lanes] == [(0, 1, 4, 5, 6, 7), (2, 3)]


def test_messages_of_an_interleaved_pipeline_go_round_over_links_of_their_own():
    scenario = load_scenario("h100-llama-3-8b", [*SMALL, *LAYOUTS["interleaved"]])
    traffic = build_traffic(scenario, default_calibration(scenario.machine))
    (lane,) = traffic.lanes
    assert set(lane.around) == {(3, 0), (0, 3)}
    assert "pp 3 to 0" in traffic.names.values()
    flows = [flow for hop in (*lane.up, *lane.down, *lane.around.values()) for flow in hop]
    assert len(flows) == len(set(flows)) == 8
