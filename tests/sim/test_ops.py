"""What a rank computes: FLOP against closed forms, and against the parameters they belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.flop import step_flop
from exatwin.scenarios.framework import load_framework
from exatwin.scenarios.layout import Layout
from exatwin.scenarios.model import Model
from exatwin.scenarios.training import Training
from exatwin.sim.attention import attention_core
from exatwin.sim.layers import head_backward, head_forward, layer_backward, layer_forward, recomputed
from exatwin.sim.ops import Collective, Gemm, Shapes, backward_of

GPT = Model(layers=24, hidden=2048, heads=16, vocab=50257)
LLAMA = Model(
    layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256,
    gated=True, tied=False, positions="rotary", norm="rms", bias=False,
)  # fmt: skip
FRAMEWORK = load_framework("megatron")
RECOMPUTE = ("none", "selective", "full")


def shapes(model=GPT, tp=1, micro_batch=2, seq_len=1024, global_batch=8, flash=False):
    training = Training(seq_len=seq_len, global_batch=global_batch, precision="bf16")
    return Shapes(model, training, Layout(tp=tp, micro_batch=micro_batch, flash_attention=flash))


def gemm_flop(ops):
    return sum(op.flop for op in ops if isinstance(op, Gemm))


@st.composite
def any_shapes(draw):
    tp = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.integers(1, 3))
    heads, head_dim = tp * groups * draw(st.integers(1, 3)), draw(st.sampled_from([16, 64, 96]))
    model = Model(
        layers=draw(st.integers(1, 4)),
        hidden=heads * draw(st.sampled_from([16, 64])),
        heads=heads,
        head_dim=head_dim,
        kv_heads=tp * groups,
        ffn=tp * draw(st.integers(1, 500)),
        vocab=draw(st.integers(100, 5000)),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        norm=draw(st.sampled_from(["layer", "rms"])),
    )
    micro_batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return shapes(model, tp, micro_batch, draw(st.integers(1, 600)), micro_batch * count)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("seq_len", [512, 2048])
def test_a_gpt_layer_costs_what_megatrons_formula_says(tp, seq_len):
    """24 b s h^2 (1 + s/6h) forward, and twice that backward (Narayanan et al. 2021)."""
    some = shapes(tp=tp, seq_len=seq_len)
    b, s, h = 2, seq_len, GPT.hidden
    closed = 24 * b * s * h**2 * (1 + s / (6 * h)) / tp
    assert gemm_flop(layer_forward(some)) == pytest.approx(closed, rel=1e-12)
    assert gemm_flop(layer_backward(some, FRAMEWORK)) == pytest.approx(2 * closed, rel=1e-12)


def test_grouped_queries_and_a_gate_change_what_a_layer_costs():
    some = shapes(LLAMA, tp=4, micro_batch=1, seq_len=4096)
    tokens, h = 4096, LLAMA.hidden
    per_token = h * h + 2 * h * (8 * 128) + h * h + 3 * h * 14336
    closed = 2 * tokens * (per_token + 2 * 4096 * h) / 4
    assert gemm_flop(layer_forward(some)) == pytest.approx(closed, rel=1e-12)


@given(any_shapes())
def test_a_product_and_its_gradients_multiply_the_same_numbers(some):
    for op in layer_forward(some):
        if isinstance(op, Gemm):
            by_input, by_weight = backward_of(op)
            assert by_input.flop == by_weight.flop == op.flop
            assert {by_input.m, by_input.n} == {op.m, op.k}
            assert {by_weight.m, by_weight.n} == {op.k, op.n}


@given(any_shapes())
def test_the_weight_gradients_of_a_layer_are_as_many_as_its_weights(some):
    model, tp = some.model, some.layout.tp
    matrices = sum(
        op.m * op.n
        for op in layer_backward(some, FRAMEWORK)
        if isinstance(op, Gemm) and op.name.endswith("weight_grad")
    )
    unbiased = model.model_copy(update={"bias": False})
    assert matrices == unbiased.rank_layer_parameters(tp) - 2 * model.norm_parameters


@given(any_shapes())
def test_the_weight_gradient_of_the_head_is_as_large_as_the_head(some):
    (gradient,) = [op for op in head_backward(some, FRAMEWORK) if op.name == "logits_weight_grad"]
    assert gradient.m * gradient.n == some.model.rank_head_parameters(some.layout.tp)


@given(any_shapes(), st.sampled_from(RECOMPUTE))
def test_the_flop_of_a_step_are_those_of_its_products(some, mode):
    """All ranks' products, layer by layer, head included, add up to the closed count."""
    model, layout = some.model, some.layout
    micro_batches = some.training.global_batch // layout.micro_batch
    layer = gemm_flop(layer_forward(some)) + gemm_flop(layer_backward(some, FRAMEWORK))
    again = gemm_flop(recomputed(some, mode))
    head = gemm_flop(head_forward(some)) + gemm_flop(head_backward(some, FRAMEWORK))
    ranks = layout.tp * micro_batches
    counted = step_flop("model", model, some.training, mode, layout.tp)
    assert ranks * (model.layers * layer + head) == pytest.approx(counted, rel=1e-12)
    counted = step_flop("hardware", model, some.training, mode, layout.tp)
    assert ranks * (model.layers * (layer + again) + head) == pytest.approx(counted, rel=1e-12)


def test_fused_attention_skips_the_masked_half_forward_and_recomputes_it_backward():
    (fused,) = attention_core(shapes(flash=True))
    assert fused.flop == gemm_flop(attention_core(shapes())) / 2
    (gradient,) = backward_of(fused)
    assert gradient.flop == 2.5 * fused.flop


@pytest.mark.parametrize("flash", [False, True])
def test_selective_recomputation_repeats_the_attention_alone(flash):
    some = shapes(flash=flash)
    assert set(recomputed(some, "selective")) <= set(attention_core(some))
    assert recomputed(some, "full") == layer_forward(some)
    assert recomputed(some, "none") == []


def test_a_layer_ends_each_of_its_two_blocks_with_an_all_reduce_of_the_hidden_state():
    some = shapes(tp=2)
    for ops in (layer_forward(some), layer_backward(some, FRAMEWORK)):
        sizes = [op.bytes for op in ops if isinstance(op, Collective)]
        assert sizes == [2 * 1024 * GPT.hidden * 2] * 2  # b s h elements of 2 bytes
