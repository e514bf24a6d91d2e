"""The core of attention, on all tokens of a sequence or with the sequence cut over the context-parallel ranks.

With ring and all_gather a rank holds the first and the last of 2 c pieces in pairs (rank i the pieces i and
2 c - 1 - i), so that the causal mask leaves every rank the same work; with all_to_all its tokens are neighbours. Ring:
keys and values go round, and blocks of attention are joined by the logarithms of their sums. all_gather: keys and
values of all ranks are gathered. all_to_all: each rank gets all tokens of its share of the heads.

Sources: Liu et al. 2023, arXiv 2310.01889 (ring); Llama team 2024, arXiv 2407.21783, section 3.3.2 (gathered keys and
values, pairs of pieces); Jacobs et al. 2023, arXiv 2309.14509 (all-to-all). torch's own context_parallel fails on CPUs.

Shapes: B sequences, N query heads, K key and value heads, S tokens on this rank, T tokens in all, D width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from ...scenarios.layout import Layout
from ..comm import Channel

Heads = torch.Tensor


def positions(layout: Layout, seq_len: int, cp_rank: int, device: torch.device) -> torch.Tensor:
    """Where this rank's tokens stand in the sequence, shape (S,).

    >>> positions(Layout(cp=2), 8, 0, torch.device("cpu")).tolist()
    [0, 1, 6, 7]
    """
    everything = torch.arange(seq_len, device=device)
    if layout.cp == 1:
        return everything
    if layout.cp_attention == "all_to_all":
        return everything.chunk(layout.cp)[cp_rank]
    pieces = everything.chunk(2 * layout.cp)
    return torch.cat([pieces[cp_rank], pieces[2 * layout.cp - 1 - cp_rank]])


def attend(
    q: Heads,
    k: Heads,
    v: Heads,
    cp: Channel,
    layout: Layout,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> Heads:
    """Causal attention.

    Args:
        q: Queries, B N S D.
        k: Keys, B K S D.
        v: Values, B K S D (their width may differ).
        cp: The context-parallel group.
        layout: Whether attention is fused, and how the context-parallel ranks come by keys and values.
        slopes: Of ALiBi, one a head; None for other positions.
        scale: Of the scores; 1 / sqrt(D) where left out.

    Returns:
        B N S D.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if cp.size == 1:
        return _causal(q, k, v, layout.flash_attention, slopes, scale)
    if layout.cp_attention == "all_to_all":
        return _by_heads(q, k, v, cp, layout, slopes, scale)
    if layout.cp_attention == "all_gather":
        return _gathered(q, k, v, cp, layout, slopes, scale)
    return _Ring.apply(q, k, v, cp, scale)


# --- on one rank ----------------------------------------------------------------------------------------------------


def _causal(q: Heads, k: Heads, v: Heads, fused: bool, slopes: torch.Tensor | None, scale: float) -> Heads:
    """All tokens are here."""
    if fused and slopes is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    whole = torch.arange(k.shape[2], device=q.device)
    return _masked(q, k, v, whole[whole.shape[0] - q.shape[2] :], whole, fused, slopes, scale)


def _masked(
    q: Heads,
    k: Heads,
    v: Heads,
    q_at: torch.Tensor,
    k_at: torch.Tensor,
    fused: bool,
    slopes: torch.Tensor | None,
    scale: float,
) -> Heads:
    """Queries and keys at given positions of the sequence."""
    ahead = k_at.unsqueeze(0) > q_at.unsqueeze(1)
    if slopes is None:
        bias = torch.zeros(ahead.shape, dtype=q.dtype, device=q.device)
    else:
        distance = (k_at.unsqueeze(0) - q_at.unsqueeze(1)).to(q.dtype)
        bias = slopes.to(q.dtype).view(-1, 1, 1) * distance
    bias = bias.masked_fill(ahead, float("-inf"))
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)).float() * scale + bias
    return scores.softmax(-1).to(v.dtype) @ v


def _spread(x: Heads, heads: int) -> Heads:
    """Key and value heads, one copy for each of their query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# --- all_to_all -----------------------------------------------------------------------------------------------------


class _Exchange(Function):
    """Rows of dimension 0 to every member; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return channel.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.channel.all_to_all(grad), None


def _by_heads(
    q: Heads, k: Heads, v: Heads, cp: Channel, layout: Layout, slopes: torch.Tensor | None, scale: float
) -> Heads:
    """Each rank attends for its share of the heads, over all tokens; queries, keys and values travel in one call."""
    parts = [x.unflatten(1, (cp.size, -1)).movedim(1, 0) for x in (q, k, v)]  # c B N/c S D
    sizes = [part[0].numel() for part in parts]
    sent = torch.cat([part.reshape(cp.size, -1) for part in parts], dim=1)
    came = _Exchange.apply(sent, cp).split(sizes, dim=1)
    # B N/c T D each
    whole = [flat.reshape(part.shape).movedim(0, 2).flatten(2, 3) for flat, part in zip(came, parts, strict=True)]
    mine = None if slopes is None else slopes.chunk(cp.size)[cp.rank]
    out = _causal(whole[0], whole[1], whole[2], layout.flash_attention, mine, scale)
    back = out.unflatten(2, (cp.size, -1)).movedim(2, 0).contiguous()  # c B N/c S D
    return _Exchange.apply(back, cp).movedim(0, 1).flatten(1, 2)


# --- all_gather -----------------------------------------------------------------------------------------------------


def _gathered(
    q: Heads, k: Heads, v: Heads, cp: Channel, layout: Layout, slopes: torch.Tensor | None, scale: float
) -> Heads:
    return _GatheredAttention.apply(q, k, v, cp, layout, slopes, scale)


class _GatheredAttention(Function):
    """Attention over gathered keys and values, which the backward gathers a second time."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Heads,
        k: Heads,
        v: Heads,
        cp: Channel,
        layout: Layout,
        slopes: torch.Tensor | None,
        scale: float,
    ) -> Heads:
        ctx.save_for_backward(q, k, v)
        ctx.rest = cp, layout, slopes, scale
        return _over_all(q, _everyone(k, v, cp), k.shape[-1], *ctx.rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        cp = ctx.rest[0]
        everyone = _everyone(k, v, cp).requires_grad_()
        with torch.enable_grad():
            q_here = q.detach().requires_grad_()
            out = _over_all(q_here, everyone, k.shape[-1], *ctx.rest)
            by_q, by_all = torch.autograd.grad(out, (q_here, everyone), grad)
        mine = cp.reduce_scatter(by_all)[0]
        by_k, by_v = mine.split([k.shape[-1], v.shape[-1]], dim=-1)
        return by_q, by_k.contiguous(), by_v.contiguous(), None, None, None, None


def _everyone(k: Heads, v: Heads, cp: Channel) -> torch.Tensor:
    """Keys beside values, of all ranks: c B K S (D + D_v)."""
    return cp.all_gather(torch.cat([k, v], dim=-1).unsqueeze(0))


def _over_all(
    q: Heads,
    everyone: torch.Tensor,
    width: int,
    cp: Channel,
    layout: Layout,
    slopes: torch.Tensor | None,
    scale: float,
) -> Heads:
    """This rank's two pieces of queries over the keys up to each."""
    length = q.shape[2] * cp.size
    pieces = [everyone[rank].chunk(2, dim=2) for rank in range(cp.size)]
    ordered = [pair[0] for pair in pieces] + [pair[1] for pair in reversed(pieces)]
    keys, values = torch.cat(ordered, dim=2).split([width, everyone.shape[-1] - width], dim=-1)
    step = length // (2 * cp.size)
    outs = []
    for piece, queries in zip((cp.rank, 2 * cp.size - 1 - cp.rank), q.chunk(2, dim=2), strict=True):
        until = (piece + 1) * step
        at = torch.arange(until, device=q.device)
        outs.append(
            _masked(
                queries,
                keys[:, :, :until],
                values[:, :, :until],
                at[until - step :],
                at,
                layout.flash_attention,
                slopes,
                scale,
            )
        )
    return torch.cat(outs, dim=2)


# --- ring -----------------------------------------------------------------------------------------------------------


class _Ring(Function):
    """Blocks of keys and values go round; backward their gradients do too, one block behind. A rank's own part stays.

    With the pairs of pieces three cases arise: the rank's own block is causal; of an earlier rank's block all queries
    see the first piece; of a later rank's block the second piece of queries sees all.
    """

    @staticmethod
    def forward(ctx: Any, q: Heads, k: Heads, v: Heads, cp: Channel, scale: float) -> Heads:
        block = torch.cat([k, v], dim=-1)
        width = k.shape[-1]
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
        logsum = torch.full(q.shape[:-1], float("-inf"), dtype=torch.float32, device=q.device)
        for step in range(cp.size):
            moving = cp.shift(block) if step < cp.size - 1 else None
            owner = (cp.rank - step) % cp.size
            mine, theirs, causal = _case(cp.rank, owner, q.shape[2])
            keys, values = block[:, :, theirs].split([width, block.shape[-1] - width], dim=-1)
            part, part_logsum = block_forward(q[:, :, mine], keys, values, causal, scale)
            _join(out, logsum, mine, part, part_logsum)
            if moving is not None:
                block = moving.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, logsum)
        ctx.rest = cp, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, logsum = ctx.saved_tensors
        cp, scale = ctx.rest
        width, block = k.shape[-1], torch.cat([k, v], dim=-1)
        by_q = torch.zeros_like(q, dtype=torch.float32)
        own, carried = (torch.zeros_like(block, dtype=torch.float32) for _ in range(2))
        dot = (grad.float() * out.float()).sum(-1)  # of each query, as the softmax's gradient needs it
        wire = block.dtype
        for step in range(cp.size):
            moving = cp.shift(block) if step < cp.size - 1 else None
            owner = (cp.rank - step) % cp.size
            mine, theirs, causal = _case(cp.rank, owner, q.shape[2])
            keys, values = block[:, :, theirs].split([width, block.shape[-1] - width], dim=-1)
            found_q, found_k, found_v = block_backward(
                grad[:, :, mine], q[:, :, mine], keys, values, logsum[:, :, mine], dot[:, :, mine], causal, scale
            )
            by_q[:, :, mine] += found_q
            gradient = own if step == 0 else carried
            gradient[:, :, theirs] += torch.cat([found_k, found_v], dim=-1)
            if step > 0:  # a block's gradient follows the block; the last hop takes it home
                carried = cp.shift(carried.to(wire)).wait().float()
            if moving is not None:
                block = moving.wait()
        home = (own + carried).to(wire)
        by_k, by_v = home.split([width, block.shape[-1] - width], dim=-1)
        return by_q.to(q.dtype), by_k.contiguous(), by_v.contiguous(), None, None


def _case(rank: int, owner: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which queries of a rank see which keys of a block, and whether the mask cuts them."""
    whole, half = slice(0, tokens), tokens // 2
    if owner == rank:
        return whole, whole, True
    if owner < rank:
        return whole, slice(0, half), False
    return slice(half, tokens), whole, False


def _join(out: torch.Tensor, logsum: torch.Tensor, mine: slice, part: torch.Tensor, part_logsum: torch.Tensor) -> None:
    """Add a block's weighted values to what earlier blocks gave, in place."""
    before = logsum[:, :, mine]
    after = torch.logaddexp(before, part_logsum)
    out[:, :, mine] = out[:, :, mine] * (before - after).exp().unsqueeze(-1) + part.float() * (
        part_logsum - after
    ).exp().unsqueeze(-1)
    logsum[:, :, mine] = after


def block_forward(q: Heads, k: Heads, v: Heads, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block, and the logarithm of each query's sum of exponentials (B N S, fp32).

    Where the device has torch's fused kernel it is used; elsewhere the scores are made in fp32.
    """
    k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, logsum
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1]:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1][:, :, : q.shape[2]]
    scores = _scores(q, k, causal, scale)
    logsum = scores.logsumexp(-1)
    return (scores - logsum.unsqueeze(-1)).exp().to(v.dtype) @ v, logsum


def block_backward(
    grad: torch.Tensor,
    q: Heads,
    k: Heads,
    v: Heads,
    logsum: torch.Tensor,
    dot: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values through one block, in fp32.

    The weights follow from the whole row's sum, so that blocks need not know each other. Source: Dao 2023,
    arXiv 2307.08691, section 3.1, algorithm 2.
    """
    heads = k.shape[1]
    k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    weights = (_scores(q, k, causal, scale) - logsum.unsqueeze(-1)).exp()
    grad = grad.float()
    by_v = weights.transpose(-1, -2) @ grad
    by_scores = weights * (grad @ v.float().transpose(-1, -2) - dot.unsqueeze(-1)) * scale
    by_q = by_scores @ k.float()
    by_k = by_scores.transpose(-1, -2) @ q.float()
    if heads != q.shape[1]:
        by_k, by_v = (x.unflatten(1, (heads, -1)).sum(2) for x in (by_k, by_v))
    return by_q, by_k, by_v


def _scores(q: Heads, k: Heads, causal: bool, scale: float) -> torch.Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores
