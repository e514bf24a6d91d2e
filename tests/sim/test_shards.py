"""What a rank holds, with whom it shares it, and what is left to exchange at the end of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.framework import framework_names, load_framework
from exatwin.scenarios.model import RankParameters, load_model
from exatwin.scenarios.scenario import load_scenario, scenario_names
from exatwin.sim import shards
from exatwin.sim.traffic import placement_of


def scenario_of(framework="megatron-core", devices=32, training=None, **layout):
    whole = load_scenario("h100-llama-3-8b", [f"devices={devices}", "layout={}", "training.global_batch=512"])
    changed = whole.layout.model_copy(update=layout)
    changed = changed.model_copy(update={"dp": devices // changed.model_parallel})
    return replace(
        whole,
        layout=changed,
        framework=load_framework(framework),
        training=whole.training.model_copy(update=training or {}),
    )


def exchanged(buffers):
    return [(buffer.group, buffer.op) for buffer in buffers]


@pytest.mark.parametrize("name", scenario_names())
def test_the_ranks_of_all_stages_hold_the_model(name):
    scenario = load_scenario(name)
    layout = scenario.layout
    parts = shards.stage_parameters(scenario)
    held = sum(part.dense * layout.tp + part.expert * layout.ep * (layout.etp or layout.tp) for part in parts)
    whole = scenario.model.parameters(scenario.layout.tp, scenario.training.seq_len).total
    assert held == pytest.approx(whole, rel=0.04)  # norms and biases stand on each tensor rank, a tied embedding twice
    assert held >= whole


@pytest.mark.parametrize(
    ("framework", "zero", "after_backward", "after_optimizer"),
    [
        ("megatron", 0, [("dp", "all_reduce")], []),
        ("megatron", 1, [("dp", "all_reduce")], [("dp", "all_gather")]),
        ("megatron-core", 0, [("dp", "all_reduce")], []),
        ("megatron-core", 1, [("dp", "reduce_scatter")], [("dp", "all_gather")]),
        ("nanotron", 1, [("dp", "reduce_scatter")], [("dp", "all_gather")]),
        ("deepspeed", 1, [("dp", "all_reduce")], [("dp", "all_gather")]),
        ("deepspeed", 2, [], [("dp", "all_gather")]),
        ("deepspeed", 3, [], []),
        ("fsdp", 2, [], []),
        ("fsdp2", 3, [], []),
        ("exatwin", 0, [("dp", "all_reduce")], []),
        ("exatwin", 1, [("dp", "reduce_scatter")], [("dp", "all_gather")]),
        ("exatwin", 2, [], []),
        ("exatwin", 3, [], []),
    ],
)
def test_what_the_passes_leave_for_the_end_of_a_step(framework, zero, after_backward, after_optimizer):
    scenario = scenario_of(framework, zero=zero)
    assert exchanged(shards.after_backward(scenario)) == after_backward
    assert exchanged(shards.after_optimizer(scenario)) == after_optimizer


def test_with_a_pipeline_fsdp_reduces_once_and_keeps_its_weights():
    scenario = scenario_of("fsdp2", zero=3, pp=4, reshard_after_forward=False)
    assert exchanged(shards.after_backward(scenario)) == [("dp", "reduce_scatter")]
    assert exchanged(shards.after_optimizer(scenario)) == [("dp", "all_gather")]
    resharded = scenario_of("fsdp2", zero=3, pp=4)
    assert shards.gathers_in_pass(resharded)
    assert not shards.after_optimizer(resharded)


def test_a_hybrid_shard_scatters_near_and_sums_its_shards_over_the_copies():
    scenario = scenario_of(zero=1, shard_group=8)
    near, far = shards.after_backward(scenario)
    assert exchanged([near, far]) == [("shard", "reduce_scatter"), ("hybrid", "all_reduce")]
    assert far.bytes == pytest.approx([size / 8 for size in near.bytes])
    assert exchanged(shards.after_optimizer(scenario)) == [("shard", "all_gather")]


def test_buffers_are_bytes_of_each_rank():
    scenario = scenario_of(zero=1, pp=2)
    held = shards.stage_parameters(scenario)
    assert shards.after_backward(scenario)[0].bytes == tuple(4.0 * part.dense for part in held)
    assert shards.after_optimizer(scenario)[0].bytes == tuple(2.0 * part.dense for part in held)


@pytest.mark.parametrize("framework", framework_names())
def test_one_replica_has_nothing_to_exchange(framework):
    for zero in load_framework(framework).sharding.stages:
        precision = {} if framework != "megatron-deepspeed-fugaku" else {"precision": "fp32"}
        scenario = scenario_of(framework, devices=8, tp=8, zero=zero, training=precision)
        assert shards.after_backward(scenario) == shards.after_optimizer(scenario) == ()


def test_an_optimizer_works_on_its_shard_and_on_its_experts():
    held = RankParameters(dense=800, expert=160)
    assert shards.owned(scenario_of(zero=0), held) == 960
    assert shards.owned(scenario_of(zero=1), held) == 800 / 32 + 160 / 32
    assert shards.owned(scenario_of(zero=3, ep=8), held) == 800 / 32 + 160 / 4
    assert shards.owned(scenario_of(zero=3, shard_group=8), RankParameters(800)) == 100


def test_replicas_count_context_parallel_ranks():
    scenario = scenario_of(cp=4, tp=2)
    assert shards.replicas(scenario) == 16
    assert scenario.dp == 4


@given(st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_every_replica_is_once_in_a_shard_group_and_once_in_a_group_of_copies(size):
    scenario = scenario_of(zero=3, shard_group=size)
    placement = placement_of(scenario)
    near = shards.replica_groups_of(placement, scenario, "shard")
    far = shards.replica_groups_of(placement, scenario, "hybrid")
    assert near.shape == (32 // size, size)
    assert far.shape == (size, 32 // size)
    for groups in (near, far):
        assert sorted(groups.reshape(-1)) == list(range(32))
    shared = [len(np.intersect1d(a, b)) for a in near for b in far]
    assert shared == [1] * len(shared)


def test_tensor_ranks_sum_what_each_made_of_its_own_tokens():
    """Two norms a layer and the last one for Llama; positions, norms and the biases after each block for GPT."""
    layout = {"tp": 4, "pp": 2, "sequence_parallel": True}
    llama = scenario_of(**layout)
    hidden, layers = llama.model.hidden, llama.model.layers
    assert shards.tensor_sums(llama) == (4.0 * layers * hidden, 4.0 * (layers + 1) * hidden)
    gpt = replace(llama, model=load_model("gpt-10m").model_copy(update={"layers": 8}))
    first = 4 * 6 * 320 + gpt.training.seq_len * 320  # of a layer two norms with biases, and two biases
    assert shards.tensor_sums(gpt) == (4.0 * first, 4.0 * (4 * 6 + 2) * 320)
    sharded = scenario_of("fsdp2", zero=3, **layout)
    assert shards.tensor_sums(sharded)[0] == shards.tensor_sums(llama)[0] / shards.replicas(sharded)


def test_norms_of_heads_are_summed_without_sequence_parallelism_too():
    """Each tensor rank norms its own heads' queries and keys with weights that all ranks hold."""
    plain = scenario_of(tp=4, pp=2)
    model = plain.model.model_copy(update={"qk_norm": True})
    assert shards.tensor_sums(replace(plain, model=model)) == (4.0 * model.layers // 2 * 2 * model.head_dim,) * 2
    assert shards.tensor_sums(replace(scenario_of(tp=1, pp=2), model=model)) == (0.0, 0.0)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 1, "sequence_parallel": True}])
def test_without_such_weights_there_is_no_such_sum(layout):
    assert set(shards.tensor_sums(scenario_of(**layout))) == {0.0}


@pytest.mark.parametrize(
    ("framework", "fp32", "states", "wire"),
    [
        ("megatron-core", None, (0, 4), 4),
        ("megatron-core", False, (2, 0), 2),
        ("megatron-core", True, (0, 4), 4),
        ("deepspeed", None, (2, 0), 2),
        ("deepspeed", True, (0, 4), 2),
        ("fsdp2", True, (0, 4), 4),
        ("exatwin", None, (0, 4), 4),
    ],
)
def test_gradients_are_added_up_and_sent_as_the_training_asks(framework, fp32, states, wire):
    scenario = scenario_of(framework, training={"accumulate_fp32": fp32})
    found = shards.state_bytes(scenario)
    assert (found.gradient, found.accumulation) == states
    assert shards.wire_bytes(scenario) == wire


def test_a_tied_embedding_is_copied_between_two_ranks_only():
    tied = [f"model.tied={str(tied).lower()}" for tied in (True, False)]
    copies = [
        shards.embedding_bytes(load_scenario("h100-llama-3-8b", [*which, flag]))
        for which in (["layout={pp: 2}"], ["layout={pp: 1}"])
        for flag in tied
    ]
    assert copies[0] > 0
    assert copies[1:] == [0, 0, 0]
