"""Expert parallelism: tokens go to the ranks that hold their experts, and back.

Each rank routes the tokens of its part of the stream. Copies are sorted by expert and sent in an all-to-all; ranks that
share an expert's matrices gather each other's tokens and scatter the sums. Without a capacity no token is dropped, so
that what is sent depends on the router; with one, an expert takes at most its share of a rank's copies.

Source: Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py, ``MoEAlltoAllTokenDispatcher``.

Shapes: T tokens of the stream on this rank, K experts a token goes to, E experts in all, e on this rank, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from ..comm import Channel


@dataclass(frozen=True)
class Routing:
    """Where the copies of a rank's tokens go.

    Attributes:
        tokens: The token of each copy, sorted by expert.
        weights: What each copy's result is weighed by.
        counts: Copies for each expert, shape (E,).
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor


def route(logits: torch.Tensor, top_k: int, capacity_factor: float | None, *, balanced: bool = False) -> Routing:
    """The ``top_k`` experts of each token, weighed by the softmax over their logits.

    Args:
        logits: T E, in fp32.
        top_k: Experts of a token.
        capacity_factor: Most copies that an expert takes of this rank, over its even share; None for no bound.
        balanced: Experts by turns, whatever the logits, so that each gets its even share: for timing and counts.
    """
    tokens, experts = logits.shape
    if balanced:
        turns = torch.arange(tokens * top_k, device=logits.device).view(tokens, top_k) % experts
        chosen, best = turns, logits.gather(1, turns)
    else:
        best, chosen = logits.topk(top_k, dim=-1)
    weights = best.softmax(-1).flatten()
    expert = chosen.flatten()
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=experts)
    if capacity_factor is not None:
        most = max(math.ceil(capacity_factor * tokens * top_k / experts), 1)
        starts = counts.cumsum(0) - counts
        place = torch.arange(order.shape[0], device=order.device) - starts[expert[order]]
        order = order[place < most]
        counts = counts.clamp(max=most)
    return Routing(order // top_k, weights[order], counts)


Experts = Callable[[torch.Tensor, list[int]], torch.Tensor]


class _Dispatch(Function):
    """Rows to the ranks that want them; their gradients come back the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel, out: list[int], into: list[int]) -> torch.Tensor:
        ctx.rest = channel, out, into
        return channel.all_to_all(x, out, into)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        channel, out, into = ctx.rest
        return channel.all_to_all(grad, into, out), None, None, None


class _GatherRows(Function):
    """Rows of all ranks that share the experts' matrices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return channel.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.channel.reduce_scatter(grad), None


class _ScatterRows(Function):
    """Sums over those ranks, each rank keeping its own rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return channel.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.channel.all_gather(grad), None


def through_experts(x: torch.Tensor, routing: Routing, ep: Channel, etp: Channel, experts: Experts) -> torch.Tensor:
    """Tokens through their experts, T H to T H.

    Args:
        x: The rank's tokens of the stream.
        routing: Where they go.
        ep: The ranks that the experts are spread over.
        etp: The ranks that share an expert's matrices.
        experts: Takes rows sorted by expert and how many each of this rank's experts has; gives rows.
    """
    rows = x[routing.tokens]
    by_sender = _exchanged_counts(routing.counts, ep)  # (ep, e): copies that each member sends to each expert here
    out = routing.counts.view(ep.size, -1).sum(1).tolist()
    into = by_sender.sum(1).tolist()
    if ep.size > 1:
        rows = _Dispatch.apply(rows, ep, out, into)
    here = rows.shape[0]
    if etp.size > 1:
        by_sender, most, real = _shared_counts(by_sender, here, etp)
        rows = _GatherRows.apply(F.pad(rows, (0, 0, 0, most - here)), etp)[real]
    order = _by_expert(by_sender)
    done = torch.empty_like(rows).index_copy(0, order, experts(rows[order], by_sender.sum(0).tolist()))
    if etp.size > 1:
        done = _ScatterRows.apply(done.new_zeros((etp.size * most, done.shape[1])).index_copy(0, real, done), etp)[
            :here
        ]
    if ep.size > 1:
        done = _Dispatch.apply(done, ep, into, out)
    weighed = done * routing.weights.to(done.dtype).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, routing.tokens, weighed)


def _shared_counts(by_sender: torch.Tensor, here: int, etp: Channel) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Counts of all ranks that share the experts, the most rows that one has, and where the real rows of all lie."""
    everyone = [torch.empty_like(by_sender) for _ in range(etp.size)]
    dist.all_gather(everyone, by_sender.contiguous(), group=etp.group)
    rows = [int(counts.sum()) for counts in everyone]
    most = max(rows)
    real = torch.cat([torch.arange(count, device=by_sender.device) + rank * most for rank, count in enumerate(rows)])
    return torch.cat(everyone), most, real


def _exchanged_counts(counts: torch.Tensor, ep: Channel) -> torch.Tensor:
    if ep.size == 1:
        return counts.unsqueeze(0)
    found = torch.empty_like(counts)
    dist.all_to_all_single(found, counts.contiguous(), group=ep.group)
    return found.view(ep.size, -1)


def _by_expert(by_rank: torch.Tensor) -> torch.Tensor:
    """The order that sorts rows, which lie by sender and then by expert, by expert."""
    senders, held = by_rank.shape
    expert = torch.arange(held, device=by_rank.device).repeat(senders)
    return expert.repeat_interleave(by_rank.flatten()).argsort(stable=True)
