"""Passes that gather weights and reduce gradients as they go: counts, bytes and what is seen of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exatwin.scenarios.framework import load_framework
from exatwin.scenarios.model import RankParameters
from exatwin.scenarios.scenario import load_scenario
from exatwin.sim import shards
from exatwin.sim.calibration import default_calibration
from exatwin.sim.compute import device_rates
from exatwin.sim.passes import PassCost
from exatwin.sim.predict import predict
from exatwin.sim.weight_streams import WeightStreams

ON_FRONTIER = ["machine=frontier", "devices=64", "training.global_batch=128"]
LAYERS = 4
LAYER, ENDS = RankParameters(10_000_000), RankParameters(2_000_000)
PARAMETERS = [ENDS, *[LAYER] * LAYERS, ENDS]


def scenario_of(framework="fsdp2", devices=16, **layout):
    """A scenario whose layout is set past the rules that are told elsewhere."""
    whole = load_scenario("h100-llama-3-8b", [f"devices={devices}", "layout={}", "training.global_batch=512"])
    changed = whole.layout.model_copy(update={"zero": 3, **layout})
    changed = changed.model_copy(update={"dp": devices // changed.model_parallel})
    return replace(whole, layout=changed, framework=load_framework(framework))


def streams_of(**case):
    scenario = scenario_of(**case)
    return WeightStreams(scenario, default_calibration(scenario.machine))


def passes(compute_s=1.0, **case):
    streams = streams_of(**case)
    forward = streams.forward([PassCost(compute_s=compute_s)] * len(PARAMETERS), PARAMETERS)
    units = [PassCost(compute_s=2 * compute_s)] * len(PARAMETERS)
    return forward, streams.backward(units, PARAMETERS[::-1])


def counts(cost):
    return {(use.group, use.op): use.count for use in cost.uses}


def sent(cost, op):
    return sum(use.bytes for use in cost.uses if use.op == op)


def test_a_full_shard_gathers_every_unit_twice_but_the_last_and_reduces_each_once():
    """As fully_shard was counted to do on four layers and a root: 9 gathers of its 5 units, 5 reductions."""
    forward, backward = passes()
    units = len(PARAMETERS)
    assert counts(forward) == {("dp", "all_gather"): units}
    assert counts(backward) == {("dp", "all_gather"): units - 1, ("dp", "reduce_scatter"): units}


def test_bytes_are_those_of_the_weights_as_computed_with_and_of_the_gradients_on_the_wire():
    forward, backward = passes()
    total, share = sum(held.dense for held in PARAMETERS), 15 / 16
    assert sent(forward, "all_gather") == pytest.approx(2 * total * share)
    assert sent(backward, "all_gather") == pytest.approx(2 * (total - ENDS.dense) * share)
    assert sent(backward, "reduce_scatter") == pytest.approx(4 * total * share)


@pytest.mark.parametrize("case", [{"reshard_after_forward": False}, {"zero": 2}])
def test_weights_that_stay_are_not_gathered_again(case):
    forward, backward = passes(**case)
    assert counts(forward)["dp", "all_gather"] == len(PARAMETERS)
    assert counts(backward) == {("dp", "reduce_scatter"): len(PARAMETERS)}


@pytest.mark.parametrize("framework", ["fsdp2", "exatwin"])
def test_a_tied_embedding_is_one_unit_with_the_head_and_stays_from_forward_to_backward(framework):
    """Root and layers: each gathered by the forward, the layers alone by the backward, all reduced once."""
    tied = scenario_of(framework)
    tied = replace(tied, model=tied.model.model_copy(update={"tied": True}))
    result = predict(tied)
    record = {one.op: one for one in result.comm if one.group == "dp"}
    layers, each = tied.model.layers, tied.micro_batches
    assert record["all_gather"].count == each * (2 * layers + 1)
    assert record["reduce_scatter"].count == each * (layers + 1)
    held = shards.rank_parameters(tied, 0).total
    root = tied.model.rank_embedding_parameters(1) + tied.model.hidden
    assert record["reduce_scatter"].bytes == pytest.approx(each * 4 * held * 15 / 16)
    assert record["all_gather"].bytes == pytest.approx(each * 2 * (2 * held - root) * 15 / 16)


def test_a_tied_embedding_over_stages_is_a_unit_of_either_end():
    tied = scenario_of("exatwin", pp=2)
    tied = replace(tied, model=tied.model.model_copy(update={"tied": True}))
    assert not shards.embedding_with_head(tied)
    stages = [shards.rank_parameters(tied, stage).total for stage in range(2)]
    record = next(one for one in predict(tied).comm if (one.group, one.op) == ("dp", "reduce_scatter"))
    assert record.bytes in [pytest.approx(4 * held * 7 / 8) for held in stages]


def test_hybrid_shard_gathers_near_and_sums_shards_over_the_copies():
    forward, backward = passes(shard_group=8)
    assert counts(forward) == {("shard", "all_gather"): 6}
    assert counts(backward) == {("shard", "all_gather"): 5, ("shard", "reduce_scatter"): 6, ("hybrid", "all_reduce"): 6}
    total = sum(held.dense for held in PARAMETERS)
    assert sent(backward, "all_reduce") == pytest.approx(4 * total / 8 * 2 * (1 / 2))


def test_a_second_copy_serves_the_backward_alone():
    forward, backward = passes(framework="deepspeed", secondary_shards=8)
    assert counts(forward) == {("dp", "all_gather"): 6}
    assert counts(backward) == {("secondary", "all_gather"): 5, ("dp", "reduce_scatter"): 6}
    near, far = ({use.op: use.busy_s for use in cost.uses}["all_gather"] for cost in (backward, forward))
    assert near < far


def test_deepspeeds_stage_two_reduces_each_micro_batch_with_an_all_reduce():
    forward, backward = passes(framework="deepspeed", zero=2)
    assert forward == PassCost(compute_s=pytest.approx(6.0))
    assert counts(backward) == {("dp", "all_reduce"): 6}


@pytest.mark.parametrize("zero", [0, 1])
def test_lower_stages_leave_passes_as_they_are(zero):
    streams = streams_of(framework="megatron-core", zero=zero)
    units = [PassCost(compute_s=1.0, tp_comm_s=0.5)] * 6
    assert not streams.active
    assert streams.forward(units, PARAMETERS) == streams.backward(units, PARAMETERS) == sum(units, PassCost())


def test_one_replica_exchanges_nothing():
    streams = streams_of(devices=8, tp=8)
    assert streams.forward([PassCost(1.0)] * 6, PARAMETERS) == PassCost(6.0)
    assert streams.backward([PassCost(1.0)] * 6, PARAMETERS).uses == ()


def test_long_layers_hide_all_but_the_ends():
    forward, backward = passes(compute_s=1.0)
    alone = streams_of().forward([PassCost(1.0)], [ENDS])
    assert forward.dp_comm_s == pytest.approx(alone.uses[0].busy_s)
    assert backward.dp_comm_s < 0.2 * sum(use.busy_s for use in backward.uses)
    assert forward.total_s == pytest.approx(forward.compute_s + forward.dp_comm_s)


def test_short_layers_hide_almost_nothing():
    cost, _ = passes(framework="fsdp", compute_s=1e-9)
    assert cost.dp_comm_s == pytest.approx(sum(use.busy_s for use in cost.uses), rel=1e-3)


def test_copies_to_and_from_the_buffers_that_travel_are_the_devices_own_work():
    """FSDP2 reads and writes gathered weights once more; FSDP1 puts gradients together, casts and divides them."""
    scenario = scenario_of()
    calibration = default_calibration(scenario.machine)
    rate = device_rates(scenario.machine, calibration, "bf16").memory_bytes_per_s
    total = sum(held.dense for held in PARAMETERS)
    (forward, backward), (plain, flat) = passes(), passes(framework="fsdp")
    assert forward.compute_s - plain.compute_s == pytest.approx(2 * 2 * total / rate, rel=0.5)
    filled = 12.0 + ((2 + 4) * total + 3 * 4 * total / 16) / rate
    assert backward.compute_s > filled
    assert flat.compute_s > filled + (2 * 2 + 2 * 4) * total / rate


def test_what_is_exposed_is_shared_out_among_the_collectives():
    for cost in passes(compute_s=0.001):
        assert sum(use.exposed_s for use in cost.uses) == pytest.approx(cost.dp_comm_s)
        assert all(use.exposed_s <= use.busy_s * (1 + 1e-12) for use in cost.uses)


def test_more_prefetch_and_no_resharding_cost_less_time():
    slow = passes(compute_s=0.00005, prefetch=0)
    quick = passes(compute_s=0.00005, prefetch=2)
    kept = passes(compute_s=0.00005, prefetch=2, reshard_after_forward=False)
    assert quick[0].total_s < slow[0].total_s
    assert kept[1].total_s < quick[1].total_s < slow[1].total_s


def test_a_reduction_that_is_not_overlapped_comes_after_the_pass():
    _, apart = passes(framework="deepspeed", zero=2)
    _, beside = passes(framework="deepspeed", zero=2, overlap_grad_reduce=True)
    (use,) = apart.uses
    assert apart.dp_comm_s == pytest.approx(use.busy_s)
    assert beside.dp_comm_s < apart.dp_comm_s


def test_experts_are_gathered_over_the_ranks_that_hold_the_same():
    streams = streams_of(ep=4)
    held = RankParameters(1_000_000, 8_000_000)
    forward = streams.forward([PassCost(1.0)] * 2, [held] * 2)
    assert counts(forward) == {("dp", "all_gather"): 2, ("edp", "all_gather"): 2}
    expert = {use.group: use.bytes for use in forward.uses}["edp"]
    assert expert == pytest.approx(2 * 2 * held.expert * 3 / 4)


def test_with_a_pipeline_weights_that_stay_are_gathered_once_a_step_and_gradients_reduced_once():
    streams = streams_of(pp=2, reshard_after_forward=False)
    assert not streams.active


def test_the_library_says_how_its_collectives_ran():
    streams = streams_of()
    streams.forward([PassCost(1.0)] * 6, PARAMETERS)
    assert set(streams.algorithms()) == {("dp", "all_gather")}


def test_a_second_copy_pays_where_a_node_is_quicker_inside():
    """Eight nodes of Frontier, nothing gathered ahead: weights come back over Infinity Fabric, not over the NICs."""
    seconds = {}
    for near in ("null", "8"):
        layout = f"layout={{zero: 3, recompute: full, prefetch: 0, secondary_shards: {near}}}"
        scenario = load_scenario("h100-llama-3-8b", [*ON_FRONTIER, "framework=deepspeed", layout])
        seconds[near] = predict(scenario, fidelity="recurrence").step_s
    assert seconds["8"] < seconds["null"]


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed", "megatron-core"])
def test_each_stage_of_zero_can_be_asked_and_holds_less(framework):
    peaks, steps = [], []
    stages = [zero for zero in load_framework(framework).sharding.stages if zero]
    for zero in stages:
        answer = predict(
            load_scenario(
                "h100-llama-3-8b",
                [*ON_FRONTIER, f"framework={framework}", f"layout={{zero: {zero}, recompute: full}}"],
            ),
            fidelity="recurrence",
        )
        peaks.append(answer.memory.worst.peak_bytes)
        steps.append(answer.step_s)
    assert sorted(peaks, reverse=True) == peaks
    assert max(steps) < 3 * min(steps)
