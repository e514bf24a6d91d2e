"""Tensor parallelism, and sequence parallelism with it: parameters are cut, and each collective is made by hand.

A block that is cut over the tensor ranks is entered with all tokens and left with the sum of all ranks' parts: an
all-reduce each way, or with sequence parallelism a gather of the tokens and a scatter of the sums. The gathered tokens
are not kept but gathered again for the gradient of the weights, as in Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2. That is four collectives a layer; torch's own parallel styles make seven.

Shapes: B sequences in the micro-batch, S tokens of each on this rank, s those of the stream (S, or S / tp with sequence
parallelism), H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from ..comm import Channel
from ..grid import Grid, Phase

SEQUENCE = 1  # the dimension of tokens in B S H


def local(weight: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this rank computes with."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Copy(Function):
    """Tokens that all ranks have enter a cut block; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.channel.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(Function):
    """Parts of a sum leave a cut block; every rank gets the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        return channel.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Gather(Function):
    """Each rank's tokens become those of all; their gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel, dim: int) -> torch.Tensor:
        ctx.channel, ctx.dim = channel, dim
        return channel.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.channel.reduce_scatter(grad, ctx.dim), None, None


class _Scatter(Function):
    """Parts of a sum leave a cut block; each rank gets the sum of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel, dim: int) -> torch.Tensor:
        ctx.channel, ctx.dim = channel, dim
        return channel.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.channel.all_gather(grad, ctx.dim), None, None


class _GatheredProduct(Function):
    """Gathers the tokens and multiplies them by weights; keeps only this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel, phase: Phase, *weights: torch.Tensor) -> Any:
        ctx.channel, ctx.phase = channel, phase
        ctx.save_for_backward(x, *weights)
        whole = channel.all_gather(x, SEQUENCE)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        by_input, by_weights = None, [None] * len(weights)
        if ctx.phase.half != "weight":
            products = [grad @ weight for grad, weight in zip(grads, weights, strict=True)]
            by_input = ctx.channel.reduce_scatter(sum(products[1:], products[0]), SEQUENCE)
        if ctx.phase.half != "input":
            whole = ctx.channel.all_gather(x, SEQUENCE).flatten(0, -2)
            by_weights = [grad.flatten(0, -2).T @ whole for grad in grads]
        return by_input, None, None, *by_weights


def column(
    x: torch.Tensor, grid: Grid, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Tokens times weights that are cut by their output.

    Args:
        x: The stream, B s H.
        grid: The tensor group, and whether the stream is cut.
        weights: Each (output on this rank, H).
        biases: Each (output on this rank), or None.

    Returns:
        One tensor a weight, B S output.
    """
    here = [local(weight).to(x.dtype) for weight in weights]
    added = [None if bias is None else local(bias).to(x.dtype) for bias in biases]
    if grid.sequence_parallel:
        products = _GatheredProduct.apply(x, grid.tp, grid.phase, *here)
        return [y if bias is None else y + bias for y, bias in zip(products, added, strict=True)]
    x = enter(x, grid)
    return [F.linear(x, weight, bias) for weight, bias in zip(here, added, strict=True)]


def row(x: torch.Tensor, grid: Grid, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Activations that are cut by their width times a weight cut by its input; the sum over the ranks, B s H."""
    y = leave(F.linear(x, local(weight).to(x.dtype)), grid)
    return y if bias is None else y + local(bias).to(y.dtype)


def enter(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """All tokens, where the product that needs them keeps them: B s H to B S H."""
    if grid.tp.size == 1:
        return x
    return _Gather.apply(x, grid.tp, SEQUENCE) if grid.sequence_parallel else _Copy.apply(x, grid.tp)


def leave(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The sum over the tensor ranks, B S H to B s H."""
    if grid.tp.size == 1:
        return x
    return _Scatter.apply(x, grid.tp, SEQUENCE) if grid.sequence_parallel else _Reduce.apply(x, grid.tp)


def embed(tokens: torch.Tensor, words: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a vocabulary that is cut over the tensor ranks: B S numbers to B s H."""
    table = local(words)
    if grid.tp.size == 1:
        return F.embedding(tokens, table).to(dtype)
    first = grid.place.tp * table.shape[0]
    inside = (tokens >= first) & (tokens < first + table.shape[0])
    rows = F.embedding((tokens - first) * inside, table).to(dtype)
    return leave(rows * inside.unsqueeze(-1), grid)


class _CrossEntropy(Function):
    """Losses of tokens whose logits are cut by the vocabulary.

    Three all-reduces, each of one fp32 number a token: the maximum, the sum of the exponentials, the target's logit.
    Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, grid: Grid, vocab: int) -> torch.Tensor:
        scores = logits.float()
        first = grid.place.tp * scores.shape[-1]
        real = min(max(vocab - first, 0), scores.shape[-1])  # rows that only fill the vocabulary up take no part
        top = scores[..., :real].amax(-1) if real else torch.full_like(scores[..., 0], float("-inf"))
        top = grid.tp.all_reduce(top, dist.ReduceOp.MAX)
        scores = scores - top.unsqueeze(-1)
        scores[..., real:] = float("-inf")
        here = (targets >= first) & (targets < first + scores.shape[-1])
        places = (targets - first) * here
        target = torch.where(here, scores.gather(-1, places.unsqueeze(-1)).squeeze(-1), 0.0)
        target = grid.tp.all_reduce(target)
        exponentials = scores.exp_()
        total = grid.tp.all_reduce(exponentials.sum(-1))
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), places, here)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shares, places, here = ctx.saved_tensors
        by_logits = shares.scatter_add(-1, places.unsqueeze(-1), -here.to(shares.dtype).unsqueeze(-1))
        return by_logits.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, grid: Grid, vocab: int) -> torch.Tensor:
    """The loss of each token.

    Args:
        logits: B S V, this rank's part of the vocabulary.
        targets: B S.
        grid: The tensor group.
        vocab: Tokens of the vocabulary before padding.

    Returns:
        B S, in fp32, the same on all tensor ranks.
    """
    return _CrossEntropy.apply(logits, targets, grid, vocab)
