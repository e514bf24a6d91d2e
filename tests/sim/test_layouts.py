"""The ops of a rank under each layout: what is cut, what travels, and that nothing is done twice or lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exatwin.scenarios.flop import step_flop
from exatwin.scenarios.framework import load_framework
from exatwin.scenarios.layout import Layout
from exatwin.scenarios.model import Model
from exatwin.scenarios.training import Training
from exatwin.sim.attention import attention_core
from exatwin.sim.experts import expert_rows
from exatwin.sim.layers import (
    embedding_backward,
    embedding_forward,
    head_backward,
    head_forward,
    layer_backward,
    layer_forward,
    recomputed,
    weight_part,
)
from exatwin.sim.ops import Beside, Collective, Elementwise, FusedAttention, Gemm, RingAttention, Shapes, of_weights
from exatwin.topology.files import build

from .asked import DEEPSEEK, GPT, LLAMA, MIXTRAL

MEGATRON, CORE = load_framework("megatron"), load_framework("megatron-core")
MODELS = {model["name"]: build(Model, model, "") for model in (GPT, LLAMA, MIXTRAL, DEEPSEEK)}
CP = ("ring", "all_gather", "all_to_all")
models = pytest.mark.parametrize("name", MODELS)


def shapes(name="llama", *, micro_batch=1, seq_len=4096, precision="bf16", capacity=None, imbalance=1.0, **layout):
    training = Training(
        seq_len=seq_len, global_batch=8, precision=precision, capacity_factor=capacity, expert_imbalance=imbalance
    )
    return Shapes(MODELS[name], training, Layout(micro_batch=micro_batch, **layout))


def plain(ops):
    """The ops with those that run beside each other one after another."""
    return [part for op in ops for part in ((*op.work, op.collective) if isinstance(op, Beside) else (op,))]


def flop(ops):
    total = 0.0
    for op in plain(ops):
        total += op.steps * op.block.flop if isinstance(op, RingAttention) else getattr(op, "flop", 0.0)
    return total


def calls(ops, group="tp"):
    return Counter(op.op for op in plain(ops) if isinstance(op, Collective) and op.group == group)


def sent(ops, group):
    return sum(op.bytes for op in plain(ops) if isinstance(op, Collective) and op.group == group)


@models
def test_sequence_parallelism_gathers_six_times_a_layer_and_scatters_four_times(name):
    """Forward two and two, backward two and two, and two gathers again (Korthikanti et al. 2022, section 4.2.2)."""
    if MODELS[name].is_moe:
        return
    some = shapes(name, tp=4, sequence_parallel=True)
    both = layer_forward(some) + layer_backward(some, MEGATRON)
    assert calls(both) == {"all_gather": 6, "reduce_scatter": 4}
    whole = 4096 * MODELS[name].hidden * 2
    assert sent(both, "tp") == 10 * whole


def test_embedding_and_head_gather_and_scatter_as_a_layer_does():
    some = shapes(tp=4, sequence_parallel=True)
    first = embedding_forward(some) + embedding_backward(some, MEGATRON)
    last = head_forward(some) + head_backward(some, MEGATRON)
    assert calls(first) == {"reduce_scatter": 1, "all_gather": 1}
    assert calls(last) == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}  # the last of the loss


def test_a_rank_of_the_22_billion_model_calls_what_a_trace_of_torch_found():
    """48 layers, tp 8, hand-written in torch on a fake process group: 194 all-reduces, or 290 gathers and 194 scatters.

    That head kept its gathered input; Megatron's, as here, gathers it again.
    """

    def counted(sequence_parallel):
        some = shapes("gpt", tp=8, sequence_parallel=sequence_parallel)
        ends = (embedding_forward(some), embedding_backward(some, MEGATRON), head_forward(some))
        found = calls([op for ops in (*ends, head_backward(some, MEGATRON)) for op in ops if op.name != "loss_reduce"])
        for op, count in calls(layer_forward(some) + layer_backward(some, MEGATRON)).items():
            found[op] += 48 * count
        return found

    assert counted(False) == {"all_reduce": 194}
    assert counted(True) == {"all_gather": 290 + 1, "reduce_scatter": 194}


@models
def test_sequence_parallelism_cuts_what_the_residual_stream_moves_and_no_product(name):
    cut, whole = (shapes(name, tp=4, sequence_parallel=sp) for sp in (True, False))

    def stream(some):
        named = ("norm_1", "norm_2", "residual_1", "residual_2")
        return sum(op.bytes for op in layer_forward(some) if isinstance(op, Elementwise) and op.name in named)

    assert stream(cut) == stream(whole) / 4
    products = [[op for op in layer_forward(some) if not _on_every_rank(op)] for some in (cut, whole)]
    assert flop(products[0]) == flop(products[1])


@models
@pytest.mark.parametrize("attention", CP)
@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_share_all_products_evenly(name, attention, cp):
    moe = MODELS[name].is_moe
    one = shapes(name)
    part = shapes(name, cp=cp, cp_attention=attention)
    assert cp * flop(layer_forward(part, moe)) == pytest.approx(flop(layer_forward(one, moe)), rel=1e-9)
    backward = flop(layer_backward(part, MEGATRON, moe))
    assert cp * backward == pytest.approx(flop(layer_backward(one, MEGATRON, moe)), rel=1e-9)


def test_what_context_parallelism_sends_for_attention():
    """Keys and values of 8 heads of 128 once gathered or passed on; queries and results too where heads are shared."""
    tokens, key_value, query = 4096 // 4, 2 * 8 * 128, 32 * 128
    (ring,) = attention_core(shapes(cp=4))
    assert (ring.steps, ring.hop_bytes) == (4, tokens * key_value * 2)
    gather, _ = attention_core(shapes(cp=4, cp_attention="all_gather"))
    assert gather.bytes == 4 * ring.hop_bytes
    out, _, back = attention_core(shapes(cp=4, cp_attention="all_to_all"))
    assert (out.bytes, back.bytes) == (tokens * (key_value + query) * 2, tokens * query * 2)


def test_gathered_keys_are_gathered_again_backward_and_their_gradients_scattered():
    some = shapes(cp=4, cp_attention="all_gather")
    assert calls(layer_backward(some, MEGATRON), "cp") == {"all_gather": 1, "reduce_scatter": 1}


def test_attention_that_is_not_fused_can_be_cut_by_heads_or_with_gathered_keys():
    for attention in ("all_gather", "all_to_all"):
        one, part = (shapes(cp=cp, cp_attention=attention, flash_attention=False) for cp in (1, 4))
        assert 4 * flop(layer_forward(part)) == flop(layer_forward(one))


expert_layouts = st.sampled_from([(1, None, 1), (1, None, 8), (2, None, 4), (2, 1, 8), (4, 2, 4), (4, 4, 1), (4, 1, 2)])


@settings(deadline=None)
@given(st.sampled_from(["mixtral", "deepseek"]), expert_layouts, st.booleans(), st.sampled_from([1, 2]))
def test_balanced_experts_do_what_their_tokens_need_however_they_are_spread(name, cut, sp, cp):
    """The products of all ranks of a stage are those that the tokens go through, no more and no fewer."""
    tp, etp, ep = cut
    some, one = shapes(name, tp=tp, etp=etp, ep=ep, sequence_parallel=sp, cp=cp), shapes(name)
    ours = [op for op in layer_forward(some, True) if not _on_every_rank(op)]
    whole = [op for op in layer_forward(one, True) if not _on_every_rank(op)]
    assert tp * cp * flop(ours) == pytest.approx(flop(whole), rel=1e-3)  # rows an expert are whole numbers


def _on_every_rank(op):
    """The projections to the latents are not cut over the tensor group, but with sequence parallelism by tokens."""
    return isinstance(op, Gemm) and op.name.endswith("_down")


@settings(deadline=None)
@given(st.sampled_from(list(MODELS)), expert_layouts)
def test_the_weight_gradients_of_a_layer_are_its_matrices(name, cut):
    model, (tp, etp, ep) = MODELS[name], cut
    if not model.is_moe:
        etp, ep = None, 1
    some = shapes(name, tp=tp, etp=etp, ep=ep)
    made = sum(
        op.m * op.n * op.count
        for op in layer_backward(some, MEGATRON, model.is_moe)
        if isinstance(op, Gemm) and op.name.endswith("weight_grad")
    )
    layer = model.layers - 1
    held = model.layer_share(layer, tp, ep, etp)
    small = held.total - made  # norms and biases
    assert 0 <= small < 0.002 * held.total


def test_expert_ranks_exchange_each_copy_of_a_token_there_and_back():
    some = shapes("mixtral", tp=2, ep=4, sequence_parallel=True)
    copies = 4096 // 2 * 2 * 4096 * 2  # tokens of a rank, two experts each, hidden, bytes
    assert sent(layer_forward(some, True), "ep") == 2 * copies
    assert calls(layer_backward(some, MEGATRON, True), "ep") == {"all_to_all": 2}


def test_experts_that_are_not_cut_need_no_collective_of_their_tensor_group():
    whole, cut = (shapes("mixtral", tp=4, etp=etp, ep=4, sequence_parallel=True) for etp in (1, 2))
    assert calls(layer_forward(whole, True)) == {"all_gather": 1, "reduce_scatter": 1}  # attention alone
    assert not calls(layer_forward(whole, True), "etp")
    assert calls(layer_forward(cut, True), "etp") == {"all_gather": 1, "reduce_scatter": 1}


def test_skew_makes_the_busiest_rank_work_and_send_more_up_to_its_capacity():
    even, skewed, capped = (
        shapes("mixtral", ep=8, imbalance=imbalance, capacity=capacity)
        for imbalance, capacity in ((1.0, None), (1.5, None), (1.5, 1.25))
    )
    rows = [expert_rows(some)[0] for some in (even, skewed, capped)]
    assert rows == [8192, 12288, 10240]  # of 8 ranks' 4096 tokens, two experts each, an eighth
    bytes_sent = [sent(layer_forward(some, True), "ep") for some in (even, skewed, capped)]
    assert bytes_sent == [bytes_sent[0], 1.5 * bytes_sent[0], 1.25 * bytes_sent[0]]


@models
def test_the_flop_of_a_step_are_those_of_its_products(name):
    model, some = MODELS[name], shapes(name)
    kinds = [model.has_experts(layer) for layer in range(model.layers)]
    forward = sum(flop(layer_forward(some, moe)) for moe in kinds) + flop(head_forward(some))
    # Fused attention executes half of what is counted, and the gradients are twice the forward by convention.
    fused = sum(op.flop for moe in kinds for op in layer_forward(some, moe) if isinstance(op, FusedAttention))
    counted = step_flop("model", model, some.training)
    assert counted == pytest.approx(8 * 3 * (forward + fused), rel=1e-3)


@models
@pytest.mark.parametrize("layout", [{}, {"tp": 4}, {"tp": 4, "sequence_parallel": True}, {"cp": 2}])
def test_running_collectives_beside_products_changes_no_product_and_no_byte(name, layout):
    some, moe = shapes(name, **layout), MODELS[name].is_moe
    after, beside = (plain(layer_backward(some, framework, moe)) for framework in (MEGATRON, CORE))
    assert flop(after) == flop(beside)
    for group in ("tp", "cp", "ep"):
        assert calls(after, group) == calls(beside, group)
        assert sent(after, group) == sent(beside, group)


def test_a_gather_hides_beside_the_gradient_of_the_input_and_its_reduction_beside_that_of_the_weight():
    ops = [op for op in layer_backward(shapes(tp=4, sequence_parallel=True), CORE) if isinstance(op, Beside)]
    pairs = [(op.work[0].name, op.collective.op) for op in ops]
    assert pairs == [
        ("ffn_in_input_grad", "all_gather"), ("ffn_in_weight_grad", "reduce_scatter"),
        ("qkv_input_grad", "all_gather"), ("qkv_weight_grad", "reduce_scatter"),
    ]  # fmt: skip


@models
def test_a_split_backward_is_its_two_parts(name):
    moe = MODELS[name].is_moe
    ops = layer_backward(shapes(name, tp=2), CORE, moe, split=True)
    weights = weight_part(ops)
    rest = [op for op in ops if not of_weights(op)]
    assert len(weights) + len(rest) == len(ops)
    assert not [op for op in ops if isinstance(op, Beside)]
    products = [op for op in weights if isinstance(op, Gemm)]
    assert len(products) == sum(isinstance(op, Gemm) for op in layer_forward(shapes(name, tp=2), moe))
    assert flop(weights) == flop([op for op in layer_forward(shapes(name, tp=2), moe) if isinstance(op, Gemm)])


def test_the_products_of_unfused_attention_have_no_weights_to_wait_for():
    ops = layer_backward(shapes("gpt", flash_attention=False), MEGATRON)
    assert {op.name for op in weight_part(ops)} == {
        "qkv_weight_grad", "projection_weight_grad", "ffn_in_weight_grad", "ffn_out_weight_grad", "accumulate"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (("attention",), {"attention"}),
        (("norm",), {"norm_1", "norm_2"}),
        (("activation",), {"activation"}),
        (("attention", "activation"), {"attention", "activation"}),
    ],
)
def test_selective_recomputation_repeats_what_was_chosen(chosen, names):
    assert {op.name for op in recomputed(shapes(recompute_ops=chosen), "selective")} == names


def test_recomputed_experts_send_their_tokens_again():
    some = shapes("mixtral", ep=8, recompute_ops=("experts", "activation"))
    again = recomputed(some, "selective", True)
    assert calls(again, "ep") == {"all_to_all": 2}
    assert [op.name for op in again].count("expert_activation") == 1


def test_fp8_is_for_the_products_of_weights_alone():
    ops = layer_forward(shapes("mixtral", precision="fp8", flash_attention=False), True)
    by_precision = {op.name: op.precision for op in ops if isinstance(op, Gemm)}
    assert {name for name, precision in by_precision.items() if precision == "fp8"} == {
        "qkv", "projection", "expert_in", "expert_out"
    }  # fmt: skip
    assert {name for name, precision in by_precision.items() if precision == "bf16"} == {"scores", "values", "router"}


def test_parallel_blocks_share_a_norm_and_a_reduction():
    model = MODELS["gpt"].model_copy(update={"parallel_blocks": True, "layer_norms": 1})
    some = Shapes(model, Training(seq_len=2048, global_batch=8, precision="bf16"), Layout(tp=2))
    assert calls(layer_forward(some)) == {"all_reduce": 1}
    assert calls(layer_backward(some, MEGATRON)) == {"all_reduce": 1}
    assert flop(layer_forward(some)) == flop(layer_forward(shapes("gpt", tp=2, seq_len=2048)))


def test_latent_attention_sends_its_narrow_tokens():
    """With sequence parallelism the compressed queries, keys and values are gathered, not the hidden state."""
    some = shapes("deepseek", tp=2, sequence_parallel=True)
    gathers = {op.name: op.bytes for op in layer_forward(some) if isinstance(op, Collective) and op.op == "all_gather"}
    assert gathers == {
        "query_enter": 4096 * 1536 * 2,
        "key_value_enter": 4096 * (512 + 64) * 2,
        "ffn_enter": 4096 * 2048 * 2,
    }
