"""The core of attention on one rank: scores, softmax and the sum over values, whole or over a context-parallel group.

Under context parallelism a rank holds the first and the last of 2 c pieces in pairs (rank i the
pieces i and 2 c - 1 - i), so that the causal mask leaves every rank the same work.

Sources: Liu et al. 2023, arXiv 2310.01889 (ring); Llama team 2024, arXiv 2407.21783, section 3.3.2 (keys and
values gathered; the pairs of pieces); Jacobs et al. 2023, arXiv 2309.14509 (all-to-all);
Transformer Engine, transformer_engine/pytorch/attention (what travels backward).
"""

from __future__ import annotations

from .ops import MASK_BYTES, Collective, Elementwise, FusedAttention, Gemm, Op, RingAttention, Shapes, plain_precision

FP32 = 4


def attention_core(shapes: Shapes) -> list[Op]:
    """What a rank does between the projections, forward."""
    layout, e, tokens = shapes.layout, shapes.element, shapes.tokens
    heads = layout.micro_batch * shapes.rank_heads
    seq, here = shapes.training.seq_len, shapes.seq
    if layout.cp == 1:
        return _attend(shapes, heads, seq, seq)
    key_value = float(tokens * (shapes.rank_key + shapes.rank_value) * e)
    if layout.cp_attention == "all_gather":
        gather = Collective("key_value_gather", "all_gather", layout.cp * key_value, "cp", again=True)
        return [gather, *_attend(shapes, heads, here, seq)]
    if layout.cp_attention == "all_to_all":
        first = Collective("heads_out", "all_to_all", key_value + tokens * shapes.rank_query * e, "cp")
        last = Collective("heads_back", "all_to_all", float(tokens * shapes.rank_attended * e), "cp")
        return [first, *_attend(shapes, heads // layout.cp, seq, seq), last]
    return [RingAttention("attention", _fused(shapes, heads, here, here), layout.cp, key_value)]


def _attend(shapes: Shapes, heads: int, queries: int, keys: int) -> list[Op]:
    """``heads`` of all sequences, each with so many queries and keys."""
    if shapes.layout.flash_attention:
        return [_fused(shapes, heads, queries, keys)]
    scores, e, plain = heads * queries * keys, shapes.element, plain_precision(shapes)
    ops: list[Op] = [
        Gemm("scores", queries, keys, shapes.query_dim, heads, precision=plain, weights=False),
        _softmax(shapes, scores),
    ]
    if shapes.training.attention_dropout > 0:
        moved = scores * (2 * e + MASK_BYTES)  # backward the gradient in place of the weights
        ops.append(Elementwise("attention_dropout", moved, grad_bytes=moved))
    ops.append(Gemm("values", queries, shapes.value_dim, keys, heads, precision=plain, weights=False))
    return ops


def _softmax(shapes: Shapes, scores: int) -> Elementwise:
    """Scale, mask and softmax of so many scores.

    In one kernel the masked half is not read: 1/2 in and 1 out forward; weights and their gradient, 1/2 each,
    and 1/2 out backward. In kernels of their own, in fp32: conversion, scale, mask, softmax (each reads and
    writes), conversion back. Backward the same from the end, the softmax reading both its output and the
    gradient, the mask copying the gradient before it fills it.

    Source: Megatron-LM, megatron/fused_kernels/scaled_upper_triang_masked_softmax.h, and the way taken without it,
    megatron/model/fused_softmax.py, ``forward_torch_softmax``; PyTorch, tools/autograd/derivatives.yaml, masked_fill.
    """
    e = shapes.element
    if shapes.habits.fused_softmax:
        return Elementwise("softmax", 1.5 * scores * e, grad_bytes=1.5 * scores * e)
    casts, pair = 2 * (e + FP32), 2 * FP32
    there, back = casts + 3 * pair, casts + 3 * FP32 + 2 * pair + pair
    return Elementwise("softmax", float(scores * there), kernels=5, grad_bytes=float(scores * back))


def _fused(shapes: Shapes, heads: int, queries: int, keys: int) -> FusedAttention:
    """One kernel; the mask skips half of two products of 2 q k d FLOP a head."""
    width = shapes.query_dim + shapes.value_dim
    read = max(heads * shapes.rank_kv_heads // shapes.rank_heads, 1)  # heads of keys and values
    moved = float(heads * queries * width + read * keys * width) * shapes.element
    flop = float(heads * queries * keys * width)
    return FusedAttention("attention", flop, moved, shapes.query_dim, heads, queries, keys)
