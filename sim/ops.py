"""What a rank does, as ops: matrix products, attention, element-wise work, collectives; and the shapes of a rank.

Shapes follow the Megatron-LM layout. Letters: b micro-batch, s sequence, h hidden,
a heads, g key-value heads, d head width, f feed-forward, V padded vocabulary, t
tensor-parallel, c context-parallel and p expert-parallel degree, E experts, k experts
that a token goes through. `layers` and `experts` put ops together.

Sources: Shoeybi et al. 2019, arXiv 1909.08053 (the split); Korthikanti et al. 2022,
arXiv 2205.05198, sections 2 and 4 (the ops, and sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..scenarios.fields import Precision
from ..scenarios.layout import Layout
from ..scenarios.memory_habits import MemoryHabits
from ..scenarios.model import Model, RankParameters
from ..scenarios.training import Training

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}  # fp8: all but the matrix products is in bf16
MASK_BYTES = 1  # a dropout mask is one byte an element in PyTorch

Group = Literal["tp", "etp", "cp", "ep"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "copy"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """``count`` matrix products of (m x k) by (k x n).

    ``grouped`` is one kernel over matrices of several experts; ``precision`` is that of the
    operands where it differs from the training's; ``weights`` says that the second operand
    is a weight, not an activation; ``adds`` that the result is added to a sum in fp32.
    """

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    grouped: bool = False
    precision: Precision | None = None
    weights: bool = True
    adds: bool = False

    @property
    def flop(self) -> float:
        """Multiply-adds count two."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention in one kernel that skips the masked half; FLOP as executed.

    ``queries`` and ``keys`` are the tokens of one sequence on each side, ``heads`` counts those of all sequences.
    """

    name: str
    flop: float
    bytes: float
    head_dim: int = 128
    heads: int = 1
    queries: int = 0
    keys: int = 0
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Work that only moves bytes through the device's memory; ``grad_bytes`` in its backward, twice as many if None."""

    name: str
    bytes: float
    kernels: int = 1
    grad_bytes: float | None = None


DeviceOp = Gemm | FusedAttention | Elementwise


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a rank's tensor (``tp``, of the experts ``etp``), context or expert group.

    ``bytes`` is the whole buffer: what a rank holds before an all-reduce or a reduce-scatter and after
    an all-gather, what it has for all members in an all-to-all. A ``copy`` costs nothing, but its
    gradient is an all-reduce. ``again``: the backward pass does it a second time, as what it brought
    was not kept. ``grad_bytes``: the buffer of its gradient, where that differs. ``draws``: places that each
    token of an all-to-all has copies for, where it goes but once to a place that has several.
    """

    name: str
    op: CollectiveOp
    bytes: float
    group: Group = "tp"
    again: bool = False
    grad_bytes: float | None = None
    draws: int = 0


@dataclass(frozen=True, slots=True)
class Beside:
    """Work of the device that runs while a collective does; both have ended before the next op.

    ``pieces``: the work needs what the collective brings, or the other way round, so that both go in so
    many pieces, one behind the other; 1 where neither needs the other.
    """

    work: tuple[DeviceOp, ...]
    collective: Collective
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention over blocks of keys and values that go round the context-parallel group.

    Attributes:
        name: What it is called.
        block: The kernel of one of the blocks.
        steps: Blocks, one a member.
        hop_bytes: Keys and values of a block.
        backward: The gradients of keys and values go round too, one block behind.
    """

    name: str
    block: FusedAttention
    steps: int
    hop_bytes: float
    backward: bool = False


Op = DeviceOp | Collective | Beside | RingAttention

_GRADIENT: dict[CollectiveOp, CollectiveOp] = {
    "copy": "all_reduce",
    "all_reduce": "copy",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Shapes:
    """The numbers that every op of a scenario is made from."""

    model: Model
    training: Training
    layout: Layout
    habits: MemoryHabits = field(default_factory=MemoryHabits)

    @property
    def element(self) -> int:
        """Bytes of an activation or a weight as computed with."""
        return ELEMENT_BYTES[self.training.precision]

    @property
    def seq(self) -> int:
        """Tokens of one sequence on a rank, s/c."""
        return self.training.seq_len // self.layout.cp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank, b s/c."""
        return self.layout.micro_batch * self.seq

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on a rank: b s/c, over t with sequence parallelism."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def latent(self) -> bool:
        """Whether keys and values are compressed (multi-head latent attention)."""
        return self.model.kv_rank is not None

    @property
    def query_dim(self) -> int:
        """Width of a head of queries and keys; with latent attention its plain part and the rotary one together."""
        return self.model.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head of values."""
        return self.model.v_head_dim or self.query_dim

    @property
    def rank_heads(self) -> int:
        """Attention heads of a rank, a/t."""
        return self.model.heads // self.layout.tp

    @property
    def rank_kv_heads(self) -> int:
        """Key-value heads of a rank; one at least, where they are fewer than the group."""
        return max(self.model.kv_heads // self.layout.tp, 1)

    @property
    def rank_query(self) -> int:
        """Width of a rank's queries."""
        return self.rank_heads * self.query_dim

    @property
    def rank_key(self) -> int:
        """Width of a rank's keys."""
        return self.rank_kv_heads * self.query_dim

    @property
    def rank_value(self) -> int:
        """Width of a rank's values."""
        return self.rank_kv_heads * self.value_dim

    @property
    def rank_attended(self) -> int:
        """Width of what a rank's heads hand on to the projection."""
        return self.rank_heads * self.value_dim

    @property
    def rank_vocab(self) -> int:
        """Padded vocabulary of a rank, V/t."""
        return self.model.padded_vocab(self.layout.tp) // self.layout.tp

    @property
    def etp(self) -> int:
        """Tensor-parallel degree of the experts."""
        return self.layout.etp or self.layout.tp

    @property
    def expert_group(self) -> Group:
        """The group that an expert's matrices are cut over."""
        return "tp" if self.etp == self.layout.tp else "etp"

    def layer_parameters(self, moe: bool) -> RankParameters:
        """Parameters of a layer of that kind on a rank.

        Raises:
            ValueError: If the model has no such layer.
        """
        model, layout = self.model, self.layout
        for layer in range(model.layers):
            if model.has_experts(layer) == moe:
                return model.layer_share(layer, layout.tp, layout.ep, layout.etp)
        raise ValueError(f"{model.name} has no layer {'with' if moe else 'without'} experts")


def linear(shapes: Shapes, name: str, tokens: int, width_out: int, width_in: int) -> list[Op]:
    """Tokens through a weight; in fp8 with the cast of the tokens before it, which reads 2 bytes and writes 1."""
    if shapes.training.precision != "fp8":
        return [Gemm(name, tokens, width_out, width_in)]
    cast = Elementwise(f"{name}_cast", float(tokens * width_in * (shapes.element + 1)))
    return [cast, Gemm(name, tokens, width_out, width_in, precision="fp8")]


def plain_precision(shapes: Shapes) -> Precision | None:
    """Precision of products that stay out of fp8: attention, router and head."""
    return "bf16" if shapes.training.precision == "fp8" else None


def enter(shapes: Shapes, name: str, width: int | None = None, product: bool = True) -> Collective:
    """The way into a block that is cut over the tensor group: the tokens are gathered, or there already.

    With sequence parallelism the gathered tokens are not kept, but gathered again for the gradient of the
    weights; what an fp8 ``product`` reads is gathered in fp8. Source: Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.2; Transformer Engine, transformer_engine/pytorch/module/layernorm_linear.py (the cast comes first).
    """
    elements, e = float(shapes.tokens * (width or shapes.model.hidden)), shapes.element
    if shapes.layout.sequence_parallel:
        wire = 1 if product and shapes.training.precision == "fp8" else e
        return Collective(name, "all_gather", wire * elements, again=True, grad_bytes=e * elements)
    return Collective(name, "copy", e * elements)


def leave(shapes: Shapes, name: str, product: bool = True) -> Collective:
    """The way out of it: partial sums are added up, each rank keeping all tokens, or its own.

    The gradients that an fp8 ``product`` reads are gathered in fp8.
    """
    elements, e = float(shapes.tokens * shapes.model.hidden), shapes.element
    if shapes.layout.sequence_parallel:
        wire = 1 if product and shapes.training.precision == "fp8" else e
        return Collective(name, "reduce_scatter", e * elements, grad_bytes=wire * elements)
    return Collective(name, "all_reduce", e * elements)


def executed(ops: Sequence[Op]) -> list[Op]:
    """The ops without copies, which take nothing."""
    return [op for op in ops if not (isinstance(op, Collective) and op.op == "copy")]


def backward_of(op: Op) -> list[Op]:
    """The ops of the backward pass of one forward op.

    A product has one for the gradient of each operand; a fused attention recomputes its scores, so
    five products stand against two; an element-wise op moves what it says, or twice its bytes; a
    gather has a reduce-scatter, a copy an all-reduce, and the other way round.
    """
    if isinstance(op, Gemm):
        first, second = ("input_grad", "weight_grad") if op.weights else ("left_grad", "right_grad")
        return [
            replace(op, name=f"{op.name}_{first}", n=op.k, k=op.n),
            replace(op, name=f"{op.name}_{second}", m=op.k, k=op.m),
        ]
    if isinstance(op, FusedAttention):
        # Dao 2023, arXiv 2307.08691, section 3: the backward pass has five products where the forward has two.
        return [replace(op, name=f"{op.name}_grad", flop=2.5 * op.flop, bytes=2 * op.bytes, backward=True)]
    if isinstance(op, Elementwise):
        moved = 2 * op.bytes if op.grad_bytes is None else op.grad_bytes
        return [Elementwise(f"{op.name}_grad", moved, op.kernels)]
    if isinstance(op, RingAttention):
        (block,) = backward_of(op.block)
        assert isinstance(block, FusedAttention)
        return [replace(op, name=f"{op.name}_grad", block=block, backward=True)]
    assert isinstance(op, Collective)
    back = op.bytes if op.grad_bytes is None else op.grad_bytes
    gradient = replace(op, name=f"{op.name}_grad", op=_GRADIENT[op.op], bytes=back, again=False, grad_bytes=None)
    return (
        [replace(op, name=f"{op.name}_again", again=False, grad_bytes=None), gradient]
        if op.again
        else executed([gradient])
    )


def backward_ops(forward: Sequence[Op], overlap: bool = False, adds: bool = False) -> list[Op]:
    """The backward pass of a list of forward ops, last op first.

    Args:
        forward: The ops, copies among them.
        adds: A product that makes a weight's gradient adds it to those of earlier micro-batches.
        overlap: Where tokens enter a cut block, they are gathered again beside the product that makes
            their gradient, and that gradient is reduced beside the one that makes the weight's.
            Source: Megatron-LM, megatron/core/tensor_parallel/layers.py,
            ``LinearWithGradAccumulationAndAsyncCommunication.backward``.
    """
    ops: list[Op] = []
    left = list(forward)
    while left:
        op = left.pop()
        way_in = left[-1] if left else None
        if not overlap or not isinstance(op, Gemm) or not _enters(way_in):
            ops += [_added(one) if adds else one for one in backward_of(op)]
            continue
        assert isinstance(way_in, Collective)
        left.pop()
        by_input, by_weight = backward_of(op)
        by_weight = _added(by_weight) if adds else by_weight
        *gathered, reduced = backward_of(way_in)
        assert isinstance(by_input, Gemm) and isinstance(by_weight, Gemm) and isinstance(reduced, Collective)
        ops += [Beside((by_input,), one) for one in gathered if isinstance(one, Collective)] or [by_input]
        ops.append(Beside((by_weight,), reduced))
    return ops


def in_pieces(ops: Sequence[Op], pieces: int) -> list[Op]:
    """The ops with each gather beside the product that it feeds, and each product beside the scatter of its sums.

    Source: Transformer Engine, transformer_engine/common/comm_gemm_overlap (user buffers), as the recipes of
    NeMo and Megatron-Bridge switch it on with ``tp_comm_overlap``.
    """
    found: list[Op] = []
    for op in ops:
        last = found[-1] if found else None
        if isinstance(op, Gemm) and isinstance(last, Collective) and _piecewise(last, "all_gather"):
            found[-1] = Beside((op,), last, pieces)
        elif isinstance(op, Collective) and isinstance(last, Gemm) and _piecewise(op, "reduce_scatter"):
            found[-1] = Beside((last,), op, pieces)
        else:
            found.append(op)
    return found


def _piecewise(op: Collective, name: CollectiveOp) -> bool:
    return op.group == "tp" and op.op == name and not op.name.startswith(("embedding", "logits", "expert"))


def _added(op: Op) -> Op:
    return replace(op, adds=True) if isinstance(op, Gemm) and of_weights(op) else op


def _enters(op: Op | None) -> bool:
    return isinstance(op, Collective) and op.group == "tp" and (op.op == "copy" or op.again)


def of_weights(op: Op) -> bool:
    """Whether an op of a backward pass only serves the gradients of weights, so that it may wait.

    >>> [of_weights(op) for op in backward_of(Gemm("qkv", 1, 1, 1))]
    [False, True]
    """
    if isinstance(op, Collective):
        return op.group == "tp" and op.name.endswith("_again")
    return isinstance(op, (Gemm, Elementwise)) and (op.name == "accumulate" or op.name.endswith("_weight_grad"))
