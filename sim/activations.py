"""What the layers of a rank keep from the forward pass to the backward, and what the backward takes on top.

A layer is a row of operations. Each keeps something for its backward (its input, as a rule), and
the backward walks the row from its end: it makes the gradient of an operation's input, frees what
the operation kept and the gradient of its output, and goes on. The highest point of that walk is
what the backward of the layer takes on top of all that is kept.

Sources: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1 (a GPT layer with and without sequence
parallelism); DeepSeek-AI 2024, arXiv 2405.04434, section 2.1 (latent attention); NVIDIA Megatron-LM,
core/transformer/multi_latent_attention.py and core/transformer/moe (what its layers hand on); NVIDIA Transformer
Engine, pytorch/module and pytorch/attention (what its modules save). Checked against allocator peaks of
six stacks (docs/accuracy.md) and against torch's own tensors (tests/oracle).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..scenarios.layout import Layout
from ..scenarios.memory_habits import MemoryHabits
from ..scenarios.model import Model
from ..scenarios.training import Training
from .ops import ELEMENT_BYTES, MASK_BYTES

STATISTIC_BYTES = 4  # softmax statistic of a row and head, and router probabilities, are in fp32
ROUTE_BYTES = 16  # a token and expert: probability in fp32, its logit, and the map of where the token went


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix on this rank, or ``count`` alike of several experts."""

    rows: int
    columns: int
    count: int = 1

    @property
    def elements(self) -> int:
        """Of one of them."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a layer, in bytes of this rank and one micro-batch.

    Attributes:
        name: What it is.
        kept: What it keeps from forward to backward.
        made: Gradient of its input, which its backward makes and the operation before it takes over.
        taken: Gradient of its output, which is free once its backward is done.
        work: What else its backward takes while it runs.
        parts: What selective recomputation calls it; empty where it never runs again by itself.
        matrices: Its weights.
    """

    name: str
    kept: float
    made: float
    taken: float
    work: float = 0.0
    parts: tuple[str, ...] = ()
    matrices: tuple[Matrix, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The tensors of one rank and micro-batch that a layer's bytes are made from.

    >>> from exatwin.scenarios.model import load_model
    >>> sizes = Sizes(load_model("gpt-175b"), Training(seq_len=2048, global_batch=8, precision="bf16"), Layout(tp=8))
    >>> sizes.hidden, sizes.query  # 2048 x 12288 elements of 2 bytes, and an eighth of that
    (50331648, 6291456)
    """

    model: Model
    training: Training
    layout: Layout

    @property
    def element(self) -> int:
        """Bytes of an activation or a weight as computed with."""
        return ELEMENT_BYTES[self.training.precision]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that this rank's matrix products see, b s / c."""
        return self.layout.micro_batch * self.training.seq_len // self.layout.cp

    @property
    def own_tokens(self) -> int:
        """Those of them that are this rank's alone: a share of 1/t with sequence parallelism."""
        return self.tokens // self.layout.tp if self.layout.sequence_parallel else self.tokens

    @cached_property
    def hidden(self) -> int:
        """The residual stream as this rank holds it."""
        return self.own_tokens * self.model.hidden * self.element

    @cached_property
    def gathered(self) -> int:
        """The residual stream of all its tokens."""
        return self.tokens * self.model.hidden * self.element

    @property
    def mask(self) -> float:
        """A dropout mask on the residual stream; 0 without dropout."""
        return self.own_tokens * self.model.hidden * MASK_BYTES if self.training.hidden_dropout > 0 else 0.0

    def wide(self, columns: int) -> int:
        """A tensor of so many columns for each token that the matrix products see."""
        return self.tokens * columns * self.element

    @property
    def heads(self) -> int:
        """Attention heads of a rank, a/t."""
        return max(self.model.heads // self.layout.tp, 1)

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a rank; one at least, where they are fewer than the group."""
        return self.heads if self.latent else self.model.rank_kv_heads(self.layout.tp)

    @property
    def latent(self) -> bool:
        """Whether keys and values come from a compressed form."""
        return self.model.kv_rank is not None

    @property
    def key_dim(self) -> int:
        """Width of a query or key head, the rotary part of latent attention included."""
        return int(self.model.head_dim or 0)

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return int(self.model.v_head_dim or self.model.head_dim or 0)

    @cached_property
    def query(self) -> int:
        """Queries of a rank."""
        return self.wide(self.heads * self.key_dim)

    @cached_property
    def key(self) -> int:
        """Keys of a rank."""
        return self.wide(self.kv_heads * self.key_dim)

    @cached_property
    def value(self) -> int:
        """Values of a rank."""
        return self.wide(self.kv_heads * self.value_dim)

    @cached_property
    def context(self) -> int:
        """What attention hands on."""
        return self.wide(self.heads * self.value_dim)

    @property
    def scores(self) -> int:
        """Elements of the attention scores, b (a/t) s s/c."""
        return self.tokens * self.training.seq_len * self.heads

    @property
    def vocab(self) -> int:
        """Padded vocabulary of a rank, V/t."""
        return self.model.padded_vocab(self.layout.tp) // self.layout.tp

    @property
    def logits(self) -> int:
        """Elements of the logits of a rank."""
        return self.tokens * self.vocab

    @property
    def routed_rows(self) -> float:
        """Rows that this rank's experts work on: each token of the group goes through ``top_k`` of them.

        The busiest rank has ``expert_imbalance`` times the mean; a capacity factor cuts it there.
        """
        layout, busiest = self.layout, self.training.expert_imbalance
        if self.training.capacity_factor is not None:
            busiest = min(busiest, self.training.capacity_factor)
        share = (layout.etp or layout.tp) / layout.tp
        return self.tokens * share * (self.model.top_k or 1) * busiest


def layer_steps(sizes: Sizes, experts: bool, habits: MemoryHabits | None = None) -> tuple[Step, ...]:
    """The operations of one layer in order."""
    habits = habits or MemoryHabits()
    parallel = sizes.model.parallel_blocks
    mlp = (_routed if experts else _plain)(sizes, habits)
    norm = Step("norm", sizes.hidden, 0.0, sizes.hidden, work=sizes.hidden)
    return (norm, *_attention(sizes, habits), *(() if parallel else (norm,)), *mlp)


def _attention(sizes: Sizes, habits: MemoryHabits) -> Iterator[Step]:
    """From the norm's output to what is added to the residual stream."""
    model, layout = sizes.model, sizes.layout
    three = sizes.query + sizes.key + sizes.value
    if sizes.latent:
        yield from _latent_projections(sizes)
    else:
        columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.key_dim
        matrix = Matrix(columns, model.hidden)
        yield Step("qkv", sizes.hidden, sizes.hidden, three, _regather(sizes), ("norm",), (matrix,))
    again = sizes.query + sizes.key if model.qk_norm and not sizes.latent else 0.0
    yield Step("heads", three + again, three, three)
    statistic = STATISTIC_BYTES * sizes.tokens * sizes.heads
    if layout.flash_attention:
        kept, work = float(statistic), 2.0 * sizes.query * (2 / sizes.element)  # the queries' gradient adds up in fp32
    else:
        kept, work = float(sizes.scores * sizes.element), 2.0 * sizes.scores * sizes.element
        dropped = sizes.training.attention_dropout > 0
        if not habits.fused_softmax:  # the softmax's output in fp32, and the scores in fp32 while it is made
            # What is converted back is kept for the product with the values; a dropout between them keeps its own.
            kept, work = (0.0 if dropped else kept) + 4.0 * sizes.scores, work + 4.0 * sizes.scores
        if dropped:
            kept += sizes.scores * (sizes.element + MASK_BYTES)
    if layout.cp > 1:
        pair = sizes.key + sizes.value
        work += pair * layout.cp if layout.cp_attention == "all_gather" else 2 * pair
    yield Step("attention", kept, three, sizes.context, work, ("attention",))
    # Whole heads come by all-to-all: what attention made and what the projection reads are two tensors.
    exchanged = sizes.context if layout.cp > 1 and layout.cp_attention == "all_to_all" else 0.0
    matrix = Matrix(model.hidden, sizes.heads * sizes.value_dim)
    yield Step("projection", sizes.context + exchanged, sizes.context, 0.0, _regather(sizes), (), (matrix,))
    yield Step("dropout", sizes.mask, 0.0, 0.0)


def _latent_projections(sizes: Sizes) -> Iterator[Step]:
    """Down to the compressed queries and keys, a norm on each, and up to the heads."""
    model = sizes.model
    rank, rope = model.kv_rank or 0, model.rope_dim or 0
    local = sizes.own_tokens * sizes.element
    compressed = local * (rank + rope)
    down = [Matrix(rank + rope, model.hidden)]
    queries = model.q_rank
    if queries is not None:
        down.append(Matrix(queries, model.hidden))
        compressed += local * queries
    else:
        down.append(Matrix(sizes.heads * sizes.key_dim, model.hidden))
    yield Step("down", sizes.hidden, sizes.hidden, compressed, 0.0, ("norm",), tuple(down))
    up = [Matrix(sizes.heads * (sizes.key_dim - rope + sizes.value_dim), rank)]
    kept = local * (2 * rank + rope)
    if queries is not None:
        up.append(Matrix(sizes.heads * sizes.key_dim, queries))
        kept += local * 2 * queries
    yield Step("up", kept, compressed, sizes.query + sizes.key + sizes.value, 0.0, (), tuple(up))


def _regather(sizes: Sizes) -> float:
    """A tensor of all tokens that the backward of a matrix product gathers with sequence parallelism."""
    return float(sizes.gathered) if sizes.layout.sequence_parallel and sizes.layout.tp > 1 else 0.0


def _gated(sizes: Sizes, name: str, width: float, habits: MemoryHabits, parts: tuple[str, ...]) -> Step:
    """The activation: ``width`` bytes come out, one or two such tensors go in."""
    factors = 2 if sizes.model.gated else 1
    kept = width * (factors + (1 if habits.unfused_gate and sizes.model.gated else 0))
    return Step(name, kept, factors * width, width, 0.0, parts)


def _plain(sizes: Sizes, habits: MemoryHabits) -> Iterator[Step]:
    """A plain MLP."""
    model = sizes.model
    ffn = int(model.ffn or 0) // sizes.layout.tp
    yield from _mlp(sizes, "", ffn, sizes.wide(ffn), habits, float(sizes.hidden), ("norm",))
    yield Step("dropout", sizes.mask, 0.0, 0.0)


def _mlp(
    sizes: Sizes, name: str, ffn: int, width: float, habits: MemoryHabits, kept: float, parts: tuple[str, ...]
) -> Iterator[Step]:
    """Two or three matrices and the activation; ``kept`` is the input, 0 where another operation has it."""
    hidden, factors = sizes.model.hidden, 2 if sizes.model.gated else 1
    inner = tuple(part for part in parts if part == "experts")
    up, down = Matrix(factors * ffn, hidden), Matrix(hidden, ffn)
    yield Step(f"{name}up", kept, sizes.hidden, factors * width, _regather(sizes), parts, (up,))
    yield _gated(sizes, f"{name}activation", width, habits, inner)
    yield Step(f"{name}down", width, width, 0.0, _regather(sizes), (*inner, "activation"), (down,))


def _routed(sizes: Sizes, habits: MemoryHabits) -> Iterator[Step]:
    """Router, shared experts, and the routed ones with the exchange before and after them."""
    model, layout = sizes.model, sizes.layout
    experts, hidden = model.experts or 1, model.hidden
    factors = 2 if model.gated else 1
    routes = float(ROUTE_BYTES * sizes.own_tokens * experts)
    yield Step("router", sizes.hidden, sizes.hidden, 0.0, 0.0, ("norm",), (Matrix(experts, hidden),))
    yield Step("routes", routes, 0.0, 0.0, 0.0, ("experts",))
    if model.shared_experts:
        each = model.expert_ffn or int(model.ffn or 0)
        ffn = (model.shared_ffn or model.shared_experts * each) // layout.tp
        yield from _mlp(sizes, "shared ", ffn, sizes.wide(ffn), habits, 0.0, ("experts",))
    etp = layout.etp or layout.tp
    ffn = (model.expert_ffn or int(model.ffn or 0)) // etp
    local = max(experts // layout.ep, 1)
    rows = sizes.routed_rows * sizes.element
    entering, inner = rows * hidden, rows * ffn
    yield Step("dispatch", 0.0, sizes.hidden, entering, entering)
    yield Step(
        "expert up", entering, entering, factors * inner, 0.0, ("experts",), (Matrix(factors * ffn, hidden, local),)
    )
    yield _gated(sizes, "expert activation", inner, habits, ("experts",))
    yield Step("expert down", inner, inner, entering, 0.0, ("experts", "activation"), (Matrix(hidden, ffn, local),))
    yield Step("combine", 0.0, entering, 0.0, entering)


def kept_bytes(steps: Sequence[Step], given_up: frozenset[str] = frozenset()) -> float:
    """What a layer keeps, without the parts that selective recomputation gives up."""
    return sum(step.kept for step in steps if given_up.isdisjoint(step.parts))


def backward_bytes(steps: Sequence[Step], stream: float, fresh: float, given_up: frozenset[str] = frozenset()) -> float:
    """The most that the backward of a layer holds above what its forward kept.

    Args:
        steps: Its operations in order.
        stream: Gradient of the residual stream, which is there all the while.
        fresh: Bytes of a matrix's gradient that is made anew, an element; 0 where the product adds it up in place.
        given_up: Parts that are computed again when the backward reaches them.
    """
    level = most = stream
    back: set[str] = set()
    for step in reversed(steps):
        again = given_up.intersection(step.parts) - back
        if again:
            back |= again
            level += sum(other.kept for other in steps if not again.isdisjoint(other.parts))
        gradient = fresh * sum(matrix.elements * matrix.count for matrix in step.matrices)
        most = max(most, level + step.made + step.work + gradient)
        level += step.made - step.taken - step.kept
    return most


def deferred_bytes(steps: Sequence[Step]) -> float:
    """What a layer holds between the backward of its inputs and that of its weights.

    A schedule that splits the backward keeps the input of every matrix product and the gradient of its output
    (Qi et al. 2023, arXiv 2401.10241, section 2: what W needs).
    """
    return sum(step.kept + step.taken for step in steps if step.matrices)


def dummy_bytes(layers: Sequence[Sequence[Step]], element: int) -> float:
    """One gradient of every shape of matrix among the layers."""
    shapes = {(m.rows, m.columns) for steps in layers for step in steps for m in step.matrices}
    return float(element * sum(rows * columns for rows, columns in shapes))


def unit_elements(steps: Sequence[Step]) -> int:
    """Weights of one layer's matrices on this rank, norms and biases aside."""
    return sum(matrix.elements * matrix.count for step in steps for matrix in step.matrices)
