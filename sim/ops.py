"""What one rank does: a transformer layer, the embedding and the head as lists of ops.

Shapes follow the Megatron-LM layout: column-parallel projections split their
output, row-parallel ones their input, and an all-reduce over the tensor-parallel
group ends each of the two blocks of a layer. Letters: b micro-batch, s sequence,
h hidden, a heads, g key-value heads, d head width, f feed-forward, V padded
vocabulary, t tensor-parallel degree.

Sources: Shoeybi et al. 2019, arXiv 1909.08053 (the split); Korthikanti et al. 2022,
arXiv 2205.05198, sections 2 and 4 (the ops and the bytes a layer keeps).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..scenarios.fields import Precision
from ..scenarios.framework import Framework
from ..scenarios.layout import Layout
from ..scenarios.model import Model
from ..scenarios.training import Training

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}  # fp8: all but the matrix products is in bf16
MASK_BYTES = 1  # a dropout mask is one byte an element in PyTorch


@dataclass(frozen=True, slots=True)
class Gemm:
    """``count`` matrix products of (m x k) by (k x n).

    ``grouped`` is one kernel over matrices of several experts; ``precision`` is that of the
    operands where it differs from the training's.
    """

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    grouped: bool = False
    precision: Precision | None = None

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
    """Work that only moves bytes through the device's memory."""

    name: str
    bytes: float
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class TensorCollective:
    """A collective of the tensor-parallel group; ``bytes`` is the buffer of each rank."""

    name: str
    op: Literal["all_reduce", "all_gather"]
    bytes: float


Op = Gemm | FusedAttention | Elementwise | TensorCollective


@dataclass(frozen=True)
class Shapes:
    """The numbers that every op of a scenario is made from."""

    model: Model
    training: Training
    layout: Layout

    @property
    def element(self) -> int:
        """Bytes of an activation or a weight as computed with."""
        return ELEMENT_BYTES[self.training.precision]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, b s."""
        return self.layout.micro_batch * self.training.seq_len

    @property
    def hidden_elements(self) -> int:
        """Elements of one hidden state of a micro-batch, b s h."""
        return self.tokens * self.model.hidden

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
        return self.rank_heads * self.model.head_dim

    @property
    def rank_kv(self) -> int:
        """Width of a rank's keys, and of its values."""
        return self.rank_kv_heads * self.model.head_dim

    @property
    def rank_ffn(self) -> int:
        """Feed-forward width of a rank, f/t."""
        return self.model.ffn // self.layout.tp

    @property
    def rank_vocab(self) -> int:
        """Padded vocabulary of a rank, V/t."""
        return self.model.padded_vocab(self.layout.tp) // self.layout.tp

    @property
    def score_elements(self) -> int:
        """Elements of a rank's attention scores, b (a/t) s s."""
        return self.tokens * self.training.seq_len * self.rank_heads


def attention_core(shapes: Shapes) -> list[Op]:
    """Scores, softmax, dropout and the sum over values, forward."""
    training, model = shapes.training, shapes.model
    batch = shapes.layout.micro_batch * shapes.rank_heads
    seq, width, e = training.seq_len, model.head_dim, shapes.element
    if shapes.layout.flash_attention:
        # Two products of 2 b (a/t) s s d FLOP each, half of which the causal mask skips.
        flop = 2.0 * batch * seq * seq * width
        moved = shapes.tokens * (2 * shapes.rank_query + 2 * shapes.rank_kv) * e
        return [FusedAttention("attention", flop, moved, width, batch, seq, seq)]
    scores = shapes.score_elements
    ops: list[Op] = [
        Gemm("scores", seq, seq, width, batch),
        Elementwise("softmax", 2 * scores * e),  # scale, mask and softmax in one kernel: read, write
    ]
    if training.attention_dropout > 0:
        ops.append(Elementwise("attention_dropout", scores * (2 * e + MASK_BYTES)))
    ops.append(Gemm("values", seq, width, seq, batch))
    return ops


def layer_forward(shapes: Shapes) -> list[Op]:
    """One transformer layer, forward, on one rank."""
    model, tokens, e = shapes.model, shapes.tokens, shapes.element
    hidden = shapes.hidden_elements
    dropout = MASK_BYTES if shapes.training.hidden_dropout > 0 else 0
    add = hidden * (3 * e + dropout)  # bias, dropout and residual in one kernel: two reads, one write, the mask
    ffn_in = (2 if model.gated else 1) * shapes.rank_ffn
    ops: list[Op] = [
        Elementwise("norm_1", 2 * hidden * e),
        Gemm("qkv", tokens, shapes.rank_query + 2 * shapes.rank_kv, model.hidden),
        *attention_core(shapes),
        Gemm("projection", tokens, model.hidden, shapes.rank_query),
        TensorCollective("attention_reduce", "all_reduce", hidden * e),
        Elementwise("residual_1", add),
        Elementwise("norm_2", 2 * hidden * e),
        Gemm("ffn_in", tokens, ffn_in, model.hidden),
        Elementwise("activation", tokens * (ffn_in + shapes.rank_ffn) * e),
        Gemm("ffn_out", tokens, model.hidden, shapes.rank_ffn),
        TensorCollective("ffn_reduce", "all_reduce", hidden * e),
        Elementwise("residual_2", add),
    ]
    if model.positions == "rotary":
        ops.append(Elementwise("rotary", 2 * tokens * (shapes.rank_query + shapes.rank_kv) * e))
    return ops


def backward_of(op: Op) -> list[Op]:
    """The ops of the backward pass of one forward op.

    A product has one for the gradient of its input and one for that of its weight;
    a fused attention recomputes its scores, so five products stand against two; an
    element-wise op reads and writes about twice its bytes; the all-reduce of a block's
    output has its mirror on the gradient of the block's input.
    """
    if isinstance(op, Gemm):
        return [
            Gemm(f"{op.name}_input_grad", op.m, op.k, op.n, op.count),
            Gemm(f"{op.name}_weight_grad", op.k, op.n, op.m, op.count),
        ]
    if isinstance(op, FusedAttention):
        # Dao 2023, arXiv 2307.08691, section 3: the backward pass has five products where the forward has two.
        return [replace(op, name=f"{op.name}_grad", flop=2.5 * op.flop, bytes=2 * op.bytes, backward=True)]
    if isinstance(op, Elementwise):
        return [Elementwise(f"{op.name}_grad", 2 * op.bytes, op.kernels)]
    return [op]


def layer_backward(shapes: Shapes, framework: Framework) -> list[Op]:
    """One transformer layer, backward, on one rank, without recomputation."""
    ops = [grad for op in reversed(layer_forward(shapes)) for grad in backward_of(op)]
    parameters = shapes.model.rank_layer_parameters(shapes.layout.tp)
    return [*ops, accumulate(parameters, shapes, framework)]


def accumulate(parameters: int, shapes: Shapes, framework: Framework) -> Elementwise:
    """Adding a micro-batch's weight gradients to what earlier ones left.

    Reads the new gradient, reads and writes the sum.
    """
    states = framework.states[shapes.training.precision]
    kept = states.accumulation or states.gradient
    new = states.gradient or shapes.element
    return Elementwise("accumulate", parameters * (new + 2 * kept))


def recomputed(shapes: Shapes, mode: str) -> list[Op]:
    """The forward ops of a layer that the backward pass runs again."""
    if mode == "full":
        return layer_forward(shapes)
    return attention_core(shapes) if mode == "selective" else []


def embedding_forward(shapes: Shapes) -> list[Op]:
    """Word and position embedding on the first stage."""
    hidden, e = shapes.hidden_elements, shapes.element
    dropout = MASK_BYTES if shapes.training.hidden_dropout > 0 else 0
    ops: list[Op] = [
        Elementwise("embedding", 2 * hidden * e),
        TensorCollective("embedding_reduce", "all_reduce", hidden * e),
        Elementwise("embedding_add", hidden * (2 * e + dropout)),
    ]
    if shapes.model.embedding_norm:
        ops.append(Elementwise("embedding_norm", 2 * hidden * e))
    return ops


def embedding_backward(shapes: Shapes, framework: Framework) -> list[Op]:
    """The scatter of the gradient into the embedding's rows, and its accumulation over the whole shard."""
    ops: list[Op] = [Elementwise("embedding_grad", 2 * shapes.hidden_elements * shapes.element)]
    parameters = shapes.model.rank_embedding_parameters(shapes.layout.tp, shapes.training.seq_len)
    return [*ops, accumulate(parameters, shapes, framework)]


def head_forward(shapes: Shapes) -> list[Op]:
    """Final norm, logits and the vocabulary-parallel loss on the last stage."""
    hidden, e = shapes.hidden_elements, shapes.element
    logits = shapes.tokens * shapes.rank_vocab
    # The loss in fp32: convert (read e, write 4), maximum (4), subtract and exponentiate (8), sum (4), divide (8).
    return [
        Elementwise("final_norm", 2 * hidden * e),
        Gemm("logits", shapes.tokens, shapes.rank_vocab, shapes.model.hidden),
        Elementwise("loss", logits * (e + 4 + 4 + 8 + 4 + 8), kernels=5),
        TensorCollective("loss_reduce", "all_reduce", 3 * 4 * shapes.tokens),  # maximum, target logit, sum: fp32
    ]


def head_backward(shapes: Shapes, framework: Framework) -> list[Op]:
    """Gradient of loss, logits and final norm, and the accumulation of the head's shard."""
    hidden, e = shapes.hidden_elements, shapes.element
    logits = shapes.tokens * shapes.rank_vocab
    head = shapes.model.rank_head_parameters(shapes.layout.tp)
    return [
        Elementwise("loss_grad", logits * (8 + 4 + e), kernels=2),
        *backward_of(Gemm("logits", shapes.tokens, shapes.rank_vocab, shapes.model.hidden)),
        TensorCollective("logits_reduce", "all_reduce", hidden * e),
        Elementwise("final_norm_grad", 4 * hidden * e),
        accumulate(head, shapes, framework),
    ]


@dataclass(frozen=True)
class FlopCount:
    """FLOP of one whole step of the whole job: of the model, and with what is recomputed."""

    model: float
    hardware: float


def step_flop(shapes: Shapes, recompute: tuple[str, ...], layers: tuple[int, ...]) -> FlopCount:
    """FLOP of a step, attention counted in full (no causal discount), the backward pass as twice the forward.

    The convention of Narayanan et al. 2021, arXiv 2104.04473, appendix: for full recomputation and a
    GPT layer the hardware count is ``96 B s l h^2 (1 + s/6h + V/16lh)``.

    Args:
        shapes: The scenario's shapes.
        recompute: Mode of each stage.
        layers: Layers of each stage.
    """
    model, training = shapes.model, shapes.training
    batch, seq = training.global_batch, training.seq_len
    heads_width = model.heads * model.head_dim
    projections = model.hidden * (2 * heads_width + 2 * model.kv_heads * model.head_dim)
    ffn = (3 if model.gated else 2) * model.hidden * model.ffn
    attention = 4.0 * batch * seq * seq * heads_width
    layer = 2.0 * batch * seq * (projections + ffn) + attention
    head = 2.0 * batch * seq * model.hidden * model.padded_vocab(shapes.layout.tp)
    again = sum(
        count * (layer if mode == "full" else attention if mode == "selective" else 0.0)
        for count, mode in zip(layers, recompute, strict=True)
    )
    whole = 3.0 * (model.layers * layer + head)
    return FlopCount(model=whole, hardware=whole + again)
