"""What a pass costs under each layout, by what it is spent on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.sim.passes import CommUse, PassCost, added, merged

from .asked import DEEPSEEK, GPT, LLAMA, MIXTRAL, asked, cost_of

uses = st.lists(
    st.builds(
        CommUse,
        st.sampled_from(["tp", "cp", "ep"]),
        st.sampled_from(["all_reduce", "all_gather"]),
        st.floats(0, 1e9),
        st.integers(0, 99),
        st.floats(0, 9),
        st.floats(0, 9),
    ),
    max_size=6,
)
passes = st.builds(PassCost, *[st.floats(0, 9) for _ in range(7)], uses=uses.map(merged))


def passes_of(scenario, stage=0):
    cost = cost_of(scenario).stages[stage]
    return cost.forward, cost.backward


def use_of(cost, group, op):
    return next(use for use in cost.uses if (use.group, use.op) == (group, op))


def tp_count(cost):
    return sum(use.count for use in cost.uses if use.group == "tp")


@given(st.lists(passes, max_size=4), st.integers(0, 5))
def test_passes_add_up_and_come_several_times(some, count):
    whole = added(some)
    assert whole.total_s == pytest.approx(sum(one.total_s for one in some))
    for name in ("bytes", "count", "busy_s", "exposed_s"):
        held = sum(getattr(use, name) for one in some for use in one.uses)
        assert sum(getattr(use, name) for use in whole.uses) == pytest.approx(held)
    keys = [(use.group, use.op) for use in whole.uses]
    assert len(keys) == len(set(keys))
    assert whole.times(count).total_s == pytest.approx(count * whole.total_s)
    repeated = added([whole] * count)
    assert whole.times(count).tp_bytes == pytest.approx(repeated.tp_bytes)
    assert tp_count(whole.times(count)) == tp_count(repeated)


@given(passes)
def test_a_pass_on_a_sound_device_is_not_disturbed(some):
    assert some.disturbed(1.0, 2.0, 2.0) == some
    slow = replace(some, uses=()).disturbed(0.5, 2.0, 2.0)
    assert slow.compute_s == 2 * some.compute_s
    assert slow.tp_comm_s == some.tp_comm_s


@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTRAL, DEEPSEEK], ids=lambda model: model["name"])
@pytest.mark.parametrize(
    ("framework", "layout"),
    [
        ("megatron-core", {}),
        ("megatron-core", {"tp": 2}),
        ("megatron-core", {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
        ("megatron-core", {"cp": 2, "tp": 2, "sequence_parallel": True}),
        ("megatron-core", {"cp": 4, "cp_attention": "all_gather", "recompute": "selective"}),
        ("megatron-core", {"cp": 2, "cp_attention": "all_to_all", "pp": 2}),
        ("megatron-core", {"pp": 2, "tp": 2, "sequence_parallel": True}),
        ("fsdp2", {"zero": 3, "cp": 2}),
        ("fsdp2", {"zero": 3, "tp": 2, "sequence_parallel": True}),
    ],
)
def test_what_groups_expose_is_what_their_calls_expose(model, framework, layout):
    if model.get("experts"):
        layout = layout | {"ep": 2}
    kinds = {"tp": "tp_comm_s", "cp": "cp_comm_s", "ep": "ep_comm_s", "dp": "dp_comm_s", "edp": "dp_comm_s"}
    for stage in cost_of(asked(model, framework=framework, layout=layout)).stages:
        for cost in (stage.forward, stage.backward):
            shown = dict.fromkeys(kinds.values(), 0.0)
            for use in cost.uses:
                assert 0 <= use.exposed_s <= use.busy_s * (1 + 1e-9)
                if use.group in kinds:
                    shown[kinds[use.group]] += use.exposed_s
            for name, seconds in shown.items():
                assert getattr(cost, name) == pytest.approx(seconds, abs=1e-12)
        assert stage.backward.device_s > stage.forward.device_s > 0


def test_sequence_parallelism_sends_what_all_reduces_would_and_one_gather_more_a_block():
    """An all-reduce is a reduce-scatter and a gather; the tokens are gathered once more for the weights' gradients."""
    plain, cut = (
        passes_of(asked(LLAMA, framework="megatron", layout={"tp": 4, "sequence_parallel": sp})) for sp in (False, True)
    )
    assert cut[0].tp_bytes == pytest.approx(plain[0].tp_bytes)
    again = (2 * 4 + 1) * 3 / 4 * 4096 * 4096 * 2  # two blocks a layer, and the head
    assert cut[1].tp_bytes == pytest.approx(plain[1].tp_bytes + again)
    assert cut[0].compute_s < plain[0].compute_s


def test_collectives_beside_products_show_less_and_move_as_much():
    after, beside = (
        passes_of(asked(LLAMA, framework=framework, layout={"tp": 4, "sequence_parallel": True}))[1]
        for framework in ("megatron", "megatron-core")
    )
    assert beside.tp_comm_s < after.tp_comm_s
    assert beside.tp_bytes == after.tp_bytes
    assert tp_count(beside) == tp_count(after)


def test_a_ring_over_one_node_hides_behind_long_attention_but_gathered_keys_do_not():
    def shown(attention):
        layout = {"cp": 4, "cp_attention": attention}
        forward, backward = passes_of(asked(LLAMA, layout=layout, seq_len=65536))
        return forward.cp_comm_s, backward.cp_comm_s

    ring, gathered, shared = (shown(attention) for attention in ("ring", "all_gather", "all_to_all"))
    assert ring == (0.0, 0.0)
    assert gathered[1] > gathered[0]
    assert gathered[0] > 0.0
    assert shared[0] > 0.0


def test_a_ring_over_slow_links_shows():
    """With few heads and tokens attention takes less than keys and values do from node to node."""
    near, far = (
        passes_of(asked(GPT, devices=64, layout={"cp": 4, "tp": tp}, seq_len=8192, global_batch=64))[0] for tp in (1, 8)
    )
    assert far.cp_comm_s > near.cp_comm_s


def test_context_parallelism_cuts_work_about_as_often_as_it_has_ranks():
    one, four = (passes_of(asked(LLAMA, layout={"cp": cp}, seq_len=32768))[0].compute_s for cp in (1, 4))
    assert one / 4.2 < four < one / 3.8


def test_expert_parallelism_pays_messages_for_fewer_weights():
    held, spread = (cost_of(asked(MIXTRAL, layout={"ep": ep})).stages[0] for ep in (1, 8))
    assert held.parameters.expert == 8 * spread.parameters.expert
    assert held.forward.ep_comm_s == 0.0 < spread.forward.ep_comm_s
    calls = use_of(spread.forward, "ep", "all_to_all")
    assert calls.count == 2 * 4
    assert calls.bytes == pytest.approx(8 * 7 / 8 * 4096 * 2 * 4096 * 2)


def test_experts_far_apart_take_longer_to_reach():
    """Eight expert ranks of one node, or one of each of eight nodes, for as many tokens a rank."""

    def seconds(**layout):
        return passes_of(asked(MIXTRAL, devices=64, layout={"ep": 8, **layout}, global_batch=64))[0].ep_comm_s

    near, far = (seconds(tp=8, etp=etp, sequence_parallel=True) for etp in (1, 8))
    assert near < far / 2
    assert 4 * near < seconds() < 8 * near  # without tensor ranks each has eight times the tokens


def test_dense_and_expert_layers_cost_by_themselves():
    """The first layer of this model is dense, so the first of two stages has one layer of each kind."""
    first, last = cost_of(asked(DEEPSEEK, layout={"pp": 2, "ep": 4})).stages
    assert use_of(first.forward, "ep", "all_to_all").count == 2
    assert use_of(last.forward, "ep", "all_to_all").count == 4


def test_a_layer_that_predicts_a_further_token_ends_the_last_stage():
    ahead = DEEPSEEK | {"mtp_layers": 1}
    (first, plain), (same, longer) = (
        cost_of(asked(model, layout={"pp": 2, "ep": 4})).stages for model in (DEEPSEEK, ahead)
    )
    assert same.forward == first.forward
    assert longer.forward.compute_s > plain.forward.compute_s
    assert use_of(longer.forward, "ep", "all_to_all").count == 6
    assert longer.parameters.total > plain.parameters.total


def test_only_so_many_layers_are_recomputed():
    def again(layers, every=1):
        layout = {"recompute": "full", "recompute_every": every} | ({"recompute_layers": layers} if layers else {})
        return passes_of(asked(LLAMA, layout=layout))[1].recompute_s

    assert again(1) == pytest.approx(again(None) / 4)
    assert again(3) == pytest.approx(again(None) * 3 / 4)
    assert again(9) == again(None)
    assert again(None, every=2) == pytest.approx(again(None) / 2)
    assert again(3, every=2) == pytest.approx(again(None) / 2)


def test_a_schedule_that_splits_the_backward_learns_what_may_wait():
    whole, split = (
        cost_of(asked(LLAMA, layout={"pp": 2, "tp": 2, "schedule": schedule})).stages[0]
        for schedule in ("1f1b", "zb-h1")
    )
    assert whole.weight.total_s == 0.0
    assert 0.3 < split.weight.total_s / split.backward.total_s < 0.5
    assert split.weight.tp_comm_s == 0.0
    assert split.backward.tp_comm_s > whole.backward.tp_comm_s  # nothing runs beside another part


def test_virtual_stages_have_their_layers_and_their_rank():
    cost = cost_of(asked(LLAMA, layout={"pp": 2, "vpp": 2, "schedule": "zb-v"}))
    assert cost.home == (0, 1, 1, 0)
    plain = cost_of(asked(LLAMA, layout={"pp": 2}))
    forward = sum(stage.forward.compute_s for stage in cost.stages)
    assert forward == pytest.approx(sum(stage.forward.compute_s for stage in plain.stages))


def test_messages_between_stages_are_as_many_bytes_as_a_rank_has_tokens():
    def message(**layout):
        return cost_of(asked(LLAMA, layout={"pp": 2, "tp": 2, **layout})).message_bytes

    whole = 4096 * 4096 * 2
    assert message() == whole
    assert message(sequence_parallel=True) == whole / 2
    assert message(sequence_parallel=True, cp=2) == whole / 4


def test_an_algorithm_named_for_a_group_is_the_one_that_runs():
    scenario = asked(MIXTRAL, layout={"ep": 8})
    assert cost_of(scenario).algorithms["ep", "all_to_all"] == "direct"
    named = scenario.collectives.model_copy(
        update={"ep": type(scenario.collectives).model_fields["ep"].annotation.__args__[0](all_to_all="pairwise")}
    )
    assert cost_of(replace(scenario, collectives=named)).algorithms["ep", "all_to_all"] == "pairwise"


EXPERTS = {"ep": 8, "sequence_parallel": False}


def test_a_token_that_goes_once_to_a_rank_sends_less_than_a_copy_for_each_expert():
    copies, once = (
        passes_of(asked(MIXTRAL, framework="megatron-core", layout=EXPERTS | {"expert_dispatch": way}))
        for way in ("copies", "once")
    )
    share = 8 * (1 - (7 / 8) ** MIXTRAL["top_k"]) / MIXTRAL["top_k"]
    for a, b in zip(copies, once, strict=True):
        sent = [sum(use.bytes for use in cost.uses if use.group == "ep") for cost in (a, b)]
        assert sent[1] == pytest.approx(share * sent[0])
        assert b.compute_s < a.compute_s  # and nothing is sorted


def test_experts_that_go_beside_another_pass_show_less_and_slow_the_work():
    plain, hidden = (
        passes_of(asked(MIXTRAL, framework="megatron-core", layout=EXPERTS | {"overlap_experts": on}))
        for on in (False, True)
    )
    for a, b in zip(plain, hidden, strict=True):
        assert b.ep_comm_s < a.ep_comm_s and b.compute_s >= a.compute_s
        assert b.device_s < a.device_s
        assert a.compute_s <= b.device_s


def test_what_is_recorded_is_not_handed_over_kernel_by_kernel():
    hosts = [
        passes_of(asked(MIXTRAL, framework="megatron-core", layout=EXPERTS | {"graphs": graphs}))[0].host_s
        for graphs in ("none", "blocks", "step")
    ]
    assert hosts == sorted(hosts, reverse=True)
    assert hosts[-1] == 0.0


def test_fused_experts_save_passes_over_memory():
    plain, fused = (
        passes_of(asked(MIXTRAL, framework="megatron-core", layout=EXPERTS | {"fused_experts": on}))
        for on in (False, True)
    )
    assert all(b.compute_s < a.compute_s for a, b in zip(plain, fused, strict=True))
