"""The model as PyTorch modules: what the vocabulary's `Model` describes, cut as a layout says.

A decoder-only transformer: learned, rotary or ALiBi positions, layer or RMS norms, plain or gated MLPs, grouped-query
or latent attention, tied or separate head, experts. Each weight knows how it is cut (`Spec`); with tensor parallelism
it is a DTensor on the tensor ranks, so that checkpoints and FSDP know the whole; blocks compute with the local part.
Names are those of the whole model, whatever stage a layer stands on.

Shapes: B sequences in the micro-batch, S tokens of each on this rank, s those of the stream (S, or S / tp with sequence
parallelism), H hidden, N query heads and K key-value heads of the rank, D width of a head, F width of the MLP, V rows
of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from ..scenarios.flop import recompute_by_layer
from ..scenarios.layout import Layout
from ..scenarios.model import Model
from .comm import Channel
from .grid import Grid
from .initial import initial
from .parallel.context import attend, positions
from .parallel.expert import route, through_experts
from .parallel.tensor import column, embed, enter, leave, local, row

CPU = torch.device("cpu")
EPSILON = 1e-5  # of norms
ROTARY_BASE = 10000.0  # Su et al. 2021, arXiv 2104.09864, section 3.2.2


@dataclass(frozen=True)
class Spec:
    """How a weight is made and cut.

    Attributes:
        name: In the whole model.
        shape: Of the whole weight.
        cut: Dimension that the tensor ranks share (of the experts: those that share an expert); None for whole.
        expert: Whether dimension 0 counts experts, which the expert ranks share.
        kind: Of first values; see `initial`.
        rows: Rows that mean something, where the others only fill up.
        partial: Its gradient on a tensor rank is that of a part of the tokens or heads, to be summed over the group.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    expert: bool = False
    kind: str = "weight"
    rows: int | None = None
    partial: bool = False


@dataclass(frozen=True)
class Build:
    """What modules are built from.

    Attributes:
        model: The vocabulary's model.
        layout: How it is cut.
        seq_len: Tokens of a sequence.
        micro_batch: Sequences in a micro-batch.
        grid: The rank.
        dtype: What layers compute in.
        storage: What weights are kept in.
        device: Where weights are made; ``meta`` for shapes alone.
        seed: Of first values.
        capacity_factor: Of experts.
        balanced: Experts by turns; see `route`.
    """

    model: Model
    layout: Layout
    seq_len: int
    micro_batch: int
    grid: Grid
    dtype: torch.dtype = torch.float32
    storage: torch.dtype = torch.float32
    device: torch.device = CPU
    seed: int = 0
    capacity_factor: float | None = None
    balanced: bool = False

    @cached_property
    def rotary(self) -> Rotary | None:
        """What turns queries and keys of all layers; None with other positions."""
        if self.model.positions != "rotary":
            return None
        at = positions(self.layout, self.seq_len, self.grid["cp"].rank, self.grid.device)
        return Rotary(self.model.rope_dim or self.model.head_dim, at)

    def weight(self, spec: Spec) -> nn.Parameter:
        """A weight, this rank's part of it, with its `Spec` as ``spec``."""
        tensor, expert = self.grid.tp, (self.grid["ep"], self.grid["etp"])
        cuts: list[tuple[int, Channel]] = []
        if spec.expert:
            cuts.append((0, expert[0]))
        if spec.cut is not None:
            cuts.append((spec.cut, expert[1] if spec.expert else tensor))
        shape = list(spec.shape)
        for dim, channel in cuts:
            assert shape[dim] % channel.size == 0, (spec, channel.size)
            shape[dim] //= channel.size
        if self.device.type == "meta":
            values = torch.empty(shape, dtype=self.storage, device="meta")
        else:
            values = initial(spec.name, spec.shape, self.seed, kind=spec.kind, layers=self.model.layers, rows=spec.rows)
            for dim, channel in cuts:
                values = values.chunk(channel.size, dim=dim)[channel.rank]
            values = values.contiguous().to(self.device, self.storage)
        parameter = nn.Parameter(self._placed(values, spec))
        parameter.spec = spec  # type: ignore[attr-defined]
        return parameter

    def _placed(self, values: torch.Tensor, spec: Spec) -> torch.Tensor:
        """As a DTensor, where it is cut or stands beside weights that are."""
        grid = self.grid
        if spec.expert:
            if grid.expert_mesh is None or grid["ep"].size * grid["etp"].size == 1:
                return values
            mesh = grid.expert_mesh["ep", "etp"]
            across = Replicate() if spec.cut is None else Shard(spec.cut)
            return DTensor.from_local(values, mesh, [Shard(0), across], run_check=False)
        if grid.mesh is None or grid.tp.size == 1:
            return values
        placement = Replicate() if spec.cut is None else Shard(spec.cut)
        return DTensor.from_local(values, grid.mesh["tp"], [placement], run_check=False)

    def whole(self, name: str, *shape: int, kind: str = "weight", heads: bool = False) -> nn.Parameter:
        """A weight that is whole on every tensor rank; ``heads``: each rank uses it for its own heads only."""
        partial = self.grid.tp.size > 1 and (heads or self.grid.sequence_parallel)
        return self.weight(Spec(name, shape, kind=kind, partial=partial))

    def recomputed(self, op: str, mode: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A part of a layer, run again in the backward where selective recomputation names it."""
        if mode != "selective" or op not in self.layout.recompute_ops:
            return function
        return lambda *tensors: again(function, self.grid, *tensors)


def again(function: Callable[..., torch.Tensor], grid: Grid, *tensors: torch.Tensor) -> torch.Tensor:
    """Run a function that keeps nothing and runs, whole, a second time in the backward; that time is noted."""
    runs = 0

    def noted(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs == 1:
            return function(*inputs)
        with grid.log.second_run():
            return function(*inputs)

    return checkpoint(noted, *tensors, use_reentrant=False, preserve_rng_state=False, early_stop=False)  # type: ignore[no-any-return]


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dimension."""

    def __init__(self, build: Build, name: str, width: int, *, heads: bool = False) -> None:
        super().__init__()
        self.rms = build.model.norm == "rms"
        self.weight = build.whole(f"{name}.weight", width, kind="one", heads=heads)
        self.bias = (
            build.whole(f"{name}.bias", width, kind="zero", heads=heads)
            if not self.rms and build.model.norm_bias
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        weight = local(self.weight).to(x.dtype)
        if self.rms:
            return F.rms_norm(x, x.shape[-1:], weight, EPSILON)
        bias = None if self.bias is None else local(self.bias).to(x.dtype)
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)


class _Turn(torch.autograd.Function):
    """Turns pairs of elements by angles; its gradient is turned back, so that nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sine, cosine)
        return _turned(x, sine, cosine)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sine, cosine = ctx.saved_tensors
        return _turned(grad, -sine, cosine), None, None


def _turned(x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


class Rotary(nn.Module):
    """Turns pairs of elements by angles that grow with the position; source: Su et al. 2021, arXiv 2104.09864.

    Args:
        width: Elements of a head that are turned.
        at: Positions of this rank's tokens.
    """

    def __init__(self, width: int, at: torch.Tensor) -> None:
        super().__init__()
        half = width // 2
        rates = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=at.device) / half)
        angles = at.to(torch.float32).unsqueeze(1) * rates
        self.width, self.sine, self.cosine = 2 * half, angles.sin(), angles.cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """B N S D, turned in fp32."""
        if x.shape[-1] == self.width:
            return _Turn.apply(x, self.sine, self.cosine)
        turned = _Turn.apply(x[..., : self.width], self.sine, self.cosine)
        return torch.cat([turned, x[..., self.width :]], dim=-1)


def slopes(heads: int) -> torch.Tensor:
    """ALiBi's slope of each head; source: Press et al. 2022, arXiv 2108.12409, section 3, and its code.

    >>> slopes(2).tolist()
    [0.0625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    found = [2 ** (-8.0 * (head + 1) / power) for head in range(power)]
    found += [2 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * (heads - power), 2)]
    return torch.tensor(found)


class Attention(nn.Module):
    """Multi-head attention with one key and value head for each group of query heads."""

    def __init__(self, build: Build, name: str, mode: str) -> None:
        super().__init__()
        model, self.build, self.grid = build.model, build, build.grid
        hidden, width, biased = model.hidden, model.head_dim, model.bias or model.qkv_bias
        sizes = {"query": model.query_width, "key": model.kv_heads * width, "value": model.kv_heads * width}
        self.projections = nn.ParameterDict()
        for part, size in sizes.items():
            self.projections[part] = build.weight(Spec(f"{name}.projections.{part}", (size, hidden), cut=0))
            if biased:
                bias = f"{part}_bias"
                self.projections[bias] = build.weight(Spec(f"{name}.projections.{bias}", (size,), cut=0, kind="zero"))
        self.out = build.weight(Spec(f"{name}.out", (hidden, model.query_width), cut=1, kind="out"))
        self.out_bias = build.whole(f"{name}.out_bias", hidden, kind="zero") if model.bias else None
        self.query_norm = Norm(build, f"{name}.query_norm", width, heads=True) if model.qk_norm else None
        self.key_norm = Norm(build, f"{name}.key_norm", width, heads=True) if model.qk_norm else None
        self.turn = build.rotary
        self.slopes = _rank_slopes(build)
        self.core = build.recomputed("attention", mode, self._core)

    def columns(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Weights and biases that the stream is multiplied by."""
        names = ("query", "key", "value")
        biases = [self.projections.get(f"{part}_bias") for part in names]
        return [self.projections[part] for part in names], biases

    def inner(self, projected: Sequence[torch.Tensor]) -> torch.Tensor:
        """From queries, keys and values, B S (N D) each, to what the output projection reads."""
        q, k, v = (x.unflatten(-1, (-1, self.build.model.head_dim)).transpose(1, 2) for x in projected)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        return self.core(q, k, v).transpose(1, 2).flatten(2)

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, self.grid["cp"], self.build.layout, self.slopes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, B s H, to what is added to it."""
        return row(self.inner(column(x, self.grid, *self.columns())), self.grid, self.out, self.out_bias)


class LatentAttention(nn.Module):
    """Attention whose keys and values come from a narrow latent; source: DeepSeek-AI 2024, arXiv 2405.04434, 2.1."""

    def __init__(self, build: Build, name: str, mode: str) -> None:
        super().__init__()
        model, self.build, self.grid = build.model, build, build.grid
        assert model.kv_rank is not None and model.rope_dim is not None and model.v_head_dim is not None
        hidden, rank, rope = model.hidden, model.kv_rank, model.rope_dim
        self.plain = model.head_dim - rope
        wide = model.heads * (self.plain + model.v_head_dim)
        if model.q_rank:
            self.query_down = build.whole(f"{name}.query_down", model.q_rank, hidden)
            self.query_norm = Norm(build, f"{name}.query_norm", model.q_rank)
        into = model.q_rank or hidden
        self.query = build.weight(Spec(f"{name}.query", (model.query_width, into), cut=0))
        self.down = build.whole(f"{name}.down", rank + rope, hidden)
        self.norm = Norm(build, f"{name}.norm", rank)
        self.up = build.weight(Spec(f"{name}.up", (wide, rank), cut=0))
        self.out = build.weight(Spec(f"{name}.out", (hidden, model.value_width), cut=1, kind="out"))
        self.turn = build.rotary
        self.slopes = _rank_slopes(build)
        self.core = build.recomputed("attention", mode, self._core)

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, self.grid["cp"], self.build.layout, self.slopes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, B s H, to what is added to it."""
        model, grid = self.build.model, self.grid
        narrow = self.query_norm(F.linear(x, local(self.query_down).to(x.dtype))) if model.q_rank else x
        (queries,) = column(narrow, grid, [self.query], [None])
        latent, rope = F.linear(x, local(self.down).to(x.dtype)).split(
            [self.norm.weight.shape[0], model.rope_dim], dim=-1
        )
        both = enter(torch.cat([self.norm(latent), rope], dim=-1), grid)
        latent, rope = both.split([latent.shape[-1], rope.shape[-1]], dim=-1)
        q = queries.unflatten(-1, (-1, model.head_dim)).transpose(1, 2)  # B N S D
        wide = F.linear(latent, local(self.up).to(x.dtype)).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        k, v = wide.split([self.plain, model.v_head_dim], dim=-1)
        q_plain, q_rope = q.split([self.plain, model.rope_dim], dim=-1)
        k_rope = rope.unsqueeze(1)
        if self.turn is not None:
            q_rope, k_rope = self.turn(q_rope), self.turn(k_rope)
        q = torch.cat([q_plain, q_rope], dim=-1)
        k = torch.cat([k, k_rope.expand(-1, q.shape[1], -1, -1)], dim=-1)
        return row(self.core(q, k, v).transpose(1, 2).flatten(2), grid, self.out, None)


def _rank_slopes(build: Build) -> torch.Tensor | None:
    if build.model.positions != "alibi":
        return None
    return slopes(build.model.heads).chunk(build.grid.tp.size)[build.grid.tp.rank].to(build.grid.device)


class Mlp(nn.Module):
    """Two matrices with a GELU between them, or three with a SiLU gate."""

    def __init__(self, build: Build, name: str, width: int, mode: str) -> None:
        super().__init__()
        model, self.grid = build.model, build.grid
        parts = ("gate", "up") if model.gated else ("up",)
        self.wide = nn.ParameterDict()
        for part in parts:
            self.wide[part] = build.weight(Spec(f"{name}.wide.{part}", (width, model.hidden), cut=0))
            if model.bias:
                self.wide[f"{part}_bias"] = build.weight(Spec(f"{name}.wide.{part}_bias", (width,), cut=0, kind="zero"))
        self.parts = parts
        self.out = build.weight(Spec(f"{name}.out", (model.hidden, width), cut=1, kind="out"))
        self.out_bias = build.whole(f"{name}.out_bias", model.hidden, kind="zero") if model.bias else None
        self.activate = build.recomputed("activation", mode, activation)

    def columns(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Weights and biases that the stream is multiplied by."""
        biases = [self.wide.get(f"{part}_bias") for part in self.parts]
        return [self.wide[part] for part in self.parts], biases

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, B s H, to what is added to it."""
        return row(self.activate(*column(x, self.grid, *self.columns())), self.grid, self.out, self.out_bias)


def activation(first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
    """GELU, or the second factor gated by the SiLU of the first."""
    return F.gelu(first, approximate="tanh") if second is None else F.silu(first) * second


class ExpertBlock(nn.Module):
    """A router, the routed experts of this rank, and the shared ones."""

    def __init__(self, build: Build, name: str, mode: str) -> None:
        super().__init__()
        model, self.build, self.grid = build.model, build, build.grid
        assert model.experts and model.top_k
        hidden, width, number = model.hidden, model.expert_width, model.experts
        self.router = build.whole(f"{name}.router", number, hidden)
        self.router_bias = build.whole(f"{name}.router_bias", number, kind="zero") if model.bias else None
        parts = ("gate", "up") if model.gated else ("up",)
        self.experts = nn.ParameterDict()
        for part in parts:
            self.experts[part] = build.weight(Spec(f"{name}.experts.{part}", (number, width, hidden), 1, expert=True))
            if model.bias:
                bias = Spec(f"{name}.experts.{part}_bias", (number, width), 1, expert=True, kind="zero")
                self.experts[f"{part}_bias"] = build.weight(bias)
        self.experts["out"] = build.weight(Spec(f"{name}.experts.out", (number, hidden, width), 2, True, kind="out"))
        if model.bias:
            self.experts["out_bias"] = build.weight(
                Spec(f"{name}.experts.out_bias", (number, hidden), None, expert=True, kind="zero")
            )
        self.parts = parts
        self.shared = Mlp(build, f"{name}.shared", model.shared_width, mode) if model.shared_experts else None
        self.shared_gate = build.whole(f"{name}.shared_gate", 1, hidden) if model.shared_gate else None
        self.routed = build.recomputed("experts", mode, self._routed)
        self.activate = build.recomputed("activation", mode, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, B s H, to what is added to it."""
        done = self.routed(x)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * F.linear(x, local(self.shared_gate).to(x.dtype)).sigmoid()
            done = done + shared
        return done

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        bias = None if self.router_bias is None else local(self.router_bias).to(x.dtype)
        logits = F.linear(tokens, local(self.router).to(x.dtype), bias).float()
        top_k = self.build.model.top_k or 1
        routing = route(logits, top_k, self.build.capacity_factor, balanced=self.build.balanced)
        return through_experts(tokens, routing, self.grid["ep"], self.grid["etp"], self._run).view_as(x)

    def _run(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows sorted by expert through this rank's experts."""
        weights = {name: local(weight).to(rows.dtype) for name, weight in self.experts.items()}
        biases = {name: weights[f"{name}_bias"] for name in (*self.parts, "out") if f"{name}_bias" in weights}
        outs = []
        for expert, part in enumerate(rows.split(counts)):
            wide = [
                F.linear(
                    part, weights[name][expert], weights[f"{name}_bias"][expert] if f"{name}_bias" in weights else None
                )
                for name in self.parts
            ]
            bias = biases["out"][expert] if "out" in biases else None
            outs.append(F.linear(self.activate(*wide), weights["out"][expert], bias))
        return torch.cat(outs)


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, build: Build, number: int, mode: str, prefix: str = "layers") -> None:
        super().__init__()
        model, self.grid, name = build.model, build.grid, f"{prefix}.{number}"
        self.parallel = model.parallel_blocks and not model.has_experts(number)
        kind = LatentAttention if model.kv_rank is not None else Attention
        self.attention = kind(build, f"{name}.attention", mode)
        self.mlp = (
            ExpertBlock(build, f"{name}.mlp", mode)
            if model.has_experts(number)
            else Mlp(build, f"{name}.mlp", model.ffn, mode)
        )
        self.norms = nn.ModuleList([Norm(build, f"{name}.norms.{n}", model.hidden) for n in range(model.layer_norms)])
        self.normed = [build.recomputed("norm", mode, norm) for norm in self.norms]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, B s H."""
        return x + self._blocks(x) if self.parallel else self._one_after_the_other(x)

    def _one_after_the_other(self, x: torch.Tensor) -> torch.Tensor:
        outer = self.normed[2:] if len(self.normed) == 4 else []  # norms of what the blocks give, as in Gemma 2
        first, second = self.normed[0], self.normed[min(1, len(self.normed) - 1)]
        done = self.attention(first(x))
        x = x + (outer[0](done) if outer else done)
        done = self.mlp(second(x))
        return x + (outer[1](done) if outer else done)

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP on the same input: one entry, one sum over the tensor ranks."""
        attention, mlp, grid = self.attention, self.mlp, self.grid
        assert isinstance(mlp, Mlp)
        if not isinstance(attention, Attention):
            return attention(self.normed[0](x)) + mlp(self.normed[-1](x))
        (heads, head_biases), (wide, wide_biases) = attention.columns(), mlp.columns()
        if len(self.normed) == 1:
            products = column(self.normed[0](x), grid, [*heads, *wide], [*head_biases, *wide_biases])
        else:
            products = column(self.normed[0](x), grid, heads, head_biases)
            products += column(self.normed[1](x), grid, wide, wide_biases)
        attended = F.linear(attention.inner(products[: len(heads)]), local(attention.out).to(x.dtype))
        done = leave(attended + F.linear(mlp.activate(*products[len(heads) :]), local(mlp.out).to(x.dtype)), grid)
        for bias in (attention.out_bias, mlp.out_bias):
            done = done if bias is None else done + local(bias).to(done.dtype)
        return done


class Embedding(nn.Module):
    """Rows for words and positions; on the last stage of a tied model the words alone."""

    def __init__(self, build: Build, *, words_only: bool = False) -> None:
        super().__init__()
        model, self.build, self.grid = build.model, build, build.grid
        shape = (model.padded_vocab(build.layout.tp), model.hidden)
        self.words = build.weight(Spec("embedding.words", shape, cut=0, rows=model.vocab))
        self.positions = None
        self.norm = None
        if words_only:
            return
        if model.positions == "learned":
            self.positions = build.whole("embedding.positions", model.max_positions or build.seq_len, model.hidden)
        if model.embedding_norm:
            self.norm = Norm(build, "embedding.norm", model.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """B S numbers to the stream, B s H."""
        x = embed(tokens, self.words, self.grid, self.build.dtype)
        if self.positions is not None:
            at = positions(self.build.layout, self.build.seq_len, self.grid["cp"].rank, tokens.device)
            if self.grid.sequence_parallel:
                at = at.chunk(self.grid.tp.size)[self.grid.tp.rank]
            x = x + local(self.positions)[at].to(x.dtype)
        return x if self.norm is None else self.norm(x)


class Head(nn.Module):
    """The last norm and the logits."""

    def __init__(self, build: Build, embedding: Embedding | None) -> None:
        super().__init__()
        model, self.grid = build.model, build.grid
        rows = model.padded_vocab(build.layout.tp)
        self.norm = Norm(build, "head.norm", model.hidden)
        if embedding is None:
            self.words = build.weight(Spec("head.words", (rows, model.hidden), cut=0, rows=model.vocab))
        else:
            self.words = embedding.words  # the same parameter, whichever stage of this rank made it
        self.bias = build.weight(Spec("head.bias", (rows,), cut=0, kind="zero")) if model.head_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, B s H, to logits of this rank's part of the vocabulary, B S V."""
        (logits,) = column(self.norm(x), self.grid, [self.words], [self.bias])
        return logits


class Ahead(nn.Module):
    """What predicts a further token: norms of two streams, their projection into one, a layer.

    Built so that the parameters are all there; the trainer does not run it. Source: DeepSeek-AI 2024, arXiv
    2412.19437, section 2.2.
    """

    def __init__(self, build: Build, number: int) -> None:
        super().__init__()
        hidden, name = build.model.hidden, f"ahead.{number}"
        self.norms = nn.ModuleList([Norm(build, f"{name}.norms.{n}", hidden) for n in range(3)])
        self.projection = build.weight(Spec(f"{name}.projection", (hidden, 2 * hidden), cut=0))
        self.layer = Layer(build, build.model.layers - 1, "none", prefix=name)


class Stage(nn.Module):
    """A slice of the model: layers, with the embedding before the first and the head behind the last.

    Args:
        build: What it is made from.
        number: The virtual stage.
        embedding: The embedding of another stage on the same rank, which a tied head shares.
    """

    def __init__(self, build: Build, number: int, embedding: Embedding | None = None) -> None:
        super().__init__()
        model, layout = build.model, build.layout
        counts = layout.layers_by_virtual_stage(model.layers)
        first, self.number = sum(counts[:number]), number
        self.is_first, self.is_last = number == 0, number == layout.virtual_stages - 1
        modes = recompute_by_layer(layout, model.layers)[first : first + counts[number]]
        self.embedding = Embedding(build) if self.is_first else None
        self.layers = nn.ModuleDict({str(first + at): Layer(build, first + at, mode) for at, mode in enumerate(modes)})
        self.modes = dict(zip(self.layers, modes, strict=True))
        self.head = None
        if self.is_last:
            shared = self.embedding or embedding
            if model.tied and shared is None:
                shared = self.embedding = Embedding(build, words_only=True)
            self.head = Head(build, shared if model.tied else None)
            self.ahead = nn.ModuleList([Ahead(build, further) for further in range(model.mtp_layers)])
        self.dtype, self.grid = build.dtype, build.grid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token numbers (B S) or the stream (B s H), to the stream or the logits (B S V)."""
        if self.is_first:
            assert self.embedding is not None
            x = self.embedding(x)
        for name, layer in self.layers.items():
            x = again(layer, self.grid, x) if self.modes[name] == "full" else layer(x)
        return x if self.head is None else self.head(x)

    def specs(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, with its name in the whole model."""
        for parameter in self.parameters():
            yield parameter.spec.name, parameter  # type: ignore[attr-defined]
