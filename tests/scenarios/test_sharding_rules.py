"""What replicas may share: one message for each mistake, with what would be right."""

from __future__ import annotations

import pytest

from exatwin.scenarios.framework import framework_names, load_framework
from exatwin.scenarios.layout import Layout
from exatwin.scenarios.rules import Parts
from exatwin.scenarios.sharding_rules import sharding_rules
from exatwin.topology.machine import load_machine, machine_names


def problems_of(framework="deepspeed", machine="frontier", devices=64, **layout):
    parts = Parts(None, None, Layout(**layout), load_machine(machine), load_framework(framework), devices, None)
    return sharding_rules(parts)


@pytest.mark.parametrize(
    ("framework", "layout", "field", "said"),
    [
        (
            "megatron",
            {"zero": 3},
            "zero",
            "megatron has no zero=3; it has zero=0, 1; zero=3 is in deepspeed, exatwin, ",
        ),
        (
            "deepspeed",
            {"zero": 2, "pp": 4},
            "zero",
            "has no zero=2 with pp=4; it has zero=0, 1; zero=2 is in exatwin, fs",
        ),
        ("fsdp", {"zero": 1}, "zero", "fsdp has no zero=1; it has zero=0, 2, 3"),
        ("deepspeed", {"zero": 3, "shard_group": 7}, "shard_group", "7 does not divide the 64 replicas (dp x cp)"),
        ("deepspeed", {"zero": 0, "shard_group": 8}, "shard_group", "shards nothing with zero=0; set zero=1, 2 or 3"),
        ("deepspeed", {"zero": 3, "shard_group": 8, "ep": 2}, "shard_group", "goes with ep=1"),
        ("deepspeed", {"zero": 3, "secondary_shards": 5}, "secondary_shards", "it can be 1, 2, 4, 8"),
        ("deepspeed", {"zero": 2, "secondary_shards": 8}, "secondary_shards", "set zero=3"),
        (
            "deepspeed",
            {"zero": 3, "secondary_shards": 8, "reshard_after_forward": False},
            "secondary_shards",
            "reshard_after_forward=true",
        ),
        ("deepspeed", {"zero": 3, "secondary_shards": 8, "shard_group": 8}, "secondary_shards", "give one"),
        ("deepspeed", {"overlap_param_gather": True}, "overlap_param_gather", "nothing to gather with zero=0"),
    ],
)
def test_one_mistake_has_one_message(framework, layout, field, said):
    (problem,) = problems_of(framework, **layout)
    assert problem.field == f"layout.{field}"
    assert said in problem.message


def test_an_optimizer_goes_to_a_host_that_the_machine_describes():
    (problem,) = problems_of(machine="fugaku", offload_optimizer=True)
    assert problem.field == "layout.offload_optimizer"
    assert "node.host_link" in problem.message
    assert "frontier" in problem.message
    assert problems_of(machine="frontier", offload_optimizer=True) == []


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"zero": 1, "pp": 4},
        {"zero": 3, "shard_group": 8},
        {"zero": 3, "secondary_shards": 8},
        {"zero": 3, "cp": 4, "shard_group": 64},
        {"zero": 1, "overlap_param_gather": True},
    ],
)
def test_what_can_be_is_let_through(layout):
    assert problems_of(**layout) == []


@pytest.mark.parametrize("name", framework_names())
def test_a_frameworks_stages_are_in_order_and_those_with_a_pipeline_among_them(name):
    framework = load_framework(name)
    sharding = framework.sharding
    assert list(sharding.stages) == sorted(set(sharding.stages))
    assert set(sharding.pipeline_stages) <= set(sharding.stages)
    assert 0 in sharding.pipeline_stages
    assert framework.states.keys() == framework.reduce.bytes.keys() == framework.tied_reduce_bytes.keys()


@pytest.mark.parametrize(
    ("precision", "zero", "kept"),
    [
        ("bf16", 1, (2, 0, 4, 12)),
        ("bf16", 2, (0, 0, 4, 12)),
        ("bf16", 3, (0, 0, 4, 12)),
        ("fp8", 3, (0, 0, 4, 12)),
        ("fp32", 0, (4, 0, 4, 8)),
        ("fp32", 3, (4, 4, 0, 8)),
    ],
)
def test_weights_sharded_by_unit_may_be_kept_another_way(precision, zero, kept):
    states = load_framework("exatwin").state_bytes(precision, zero)
    assert (states.weight, states.gradient, states.accumulation, states.optimizer) == kept


@pytest.mark.parametrize("name", framework_names())
def test_without_a_second_way_a_precision_is_kept_one_way_at_all_stages(name):
    framework = load_framework(name)
    alone = framework.model_copy(update={"unit_states": None})
    for precision in framework.precisions:
        for zero in (0, 1, 2, 3):
            assert alone.state_bytes(precision, zero) == framework.states[precision]


def test_fp8_keeps_and_sends_what_bf16_does_unless_said():
    core = load_framework("megatron-core")
    assert core.state_bytes("fp8") == core.state_bytes("bf16")
    assert core.reduce.bytes["fp8"] == core.reduce.bytes["bf16"]


@pytest.mark.parametrize("name", machine_names())
def test_a_host_link_and_the_hosts_memory_stand_together(name):
    node = load_machine(name).node
    assert (node.host_link is None) == (node.host_memory_bandwidth is None)
    if node.host_link and node.host_memory_bandwidth:
        assert node.devices * node.host_link.value > node.host_memory_bandwidth.value / 8
