"""What is trained: a dense decoder-only transformer, and what its parts weigh.

Parameter counts are exact. Those of one rank follow Megatron's tensor
parallelism: a column-parallel matrix is cut with its bias, a row-parallel
matrix is cut and its bias is not, norms are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..topology.errors import input_error, nearest_numbers
from ..topology.files import build
from .fields import Count, Derived, Extent, Flag, Natural, Text
from .reading import bundled, read


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer of the whole model, biases included."""

    attention: int
    mlp: int
    norms: int

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.attention + self.mlp + self.norms


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model by part; ``head`` is 0 where it is tied to the embedding."""

    embedding: int
    positions: int
    layers: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        """All parts, each counted once."""
        return self.embedding + self.positions + self.layers + self.final_norm + self.head


@dataclass(frozen=True)
class RankParameters:
    """Parameters on one rank: ``dense`` are alike on all replicas, ``expert`` on those that hold the same experts."""

    dense: int
    expert: int = 0

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.dense + self.expert

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.expert + other.expert)


class Model(BaseModel):
    """A dense decoder-only transformer.

    Fields left out: ``kv_heads`` is ``heads``, ``head_dim`` is ``hidden / heads``,
    ``ffn`` is ``4 x hidden``; after validation they are numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text = "inline"
    layers: Count = Field(description="transformer layers")
    hidden: Count = Field(description="width of the residual stream")
    heads: Count = Field(description="attention heads")
    kv_heads: Derived = Field(default=None, validate_default=True, description="key and value heads; left out: heads")
    head_dim: Derived = Field(
        default=None, validate_default=True, description="width of a head; left out: hidden / heads"
    )
    ffn: Derived = Field(default=None, validate_default=True, description="width of the MLP; left out: 4 x hidden")
    vocab: Extent = Field(description="tokens in the vocabulary, before padding")
    vocab_multiple: Count = Field(default=128, description="the vocabulary is padded to a multiple of this x tp")
    gated: Flag = Field(default=False, description="a gated MLP (SwiGLU): three matrices in place of two")
    tied: Flag = Field(default=True, description="the output head shares the word embedding")
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    max_positions: Extent | None = Field(
        default=None, description="learned positions; left out: the training's seq_len"
    )
    norm: Literal["layer", "rms"] = "layer"
    bias: Flag = Field(default=True, description="linear layers carry biases")
    qkv_bias: Flag = Field(default=False, description="the query, key and value projections alone carry biases")
    qk_norm: Flag = Field(default=False, description="queries and keys are normed by head")
    parallel_blocks: Flag = Field(default=False, description="attention and MLP read the same input, as in Falcon")
    embedding_norm: Flag = Field(default=False, description="a norm follows the embedding, as in BLOOM")
    experts: Count | None = Field(default=None, description="routed experts of a mixture-of-experts layer")
    top_k: Count | None = Field(default=None, description="routed experts that a token goes through")
    expert_ffn: Extent | None = Field(default=None, description="width of one expert's MLP; left out: ffn")
    shared_experts: Natural = Field(default=0, description="experts that every token goes through")
    shared_ffn: Extent | None = Field(
        default=None, description="width of all shared experts together; left out: shared_experts x expert_ffn"
    )
    shared_gate: Flag = Field(default=False, description="the shared experts' output is gated, as in Qwen2-MoE")
    dense_layers: Natural = Field(default=0, description="first layers that have a plain MLP of width ffn")
    moe_every: Count = Field(default=1, description="one layer in so many has experts")
    kv_rank: Extent | None = Field(
        default=None, description="latent attention: width of the compressed keys and values"
    )
    q_rank: Extent | None = Field(default=None, description="latent attention: width of the compressed queries")
    rope_dim: Extent | None = Field(default=None, description="latent attention: rotary part of a query or key head")
    v_head_dim: Extent | None = Field(default=None, description="latent attention: width of a value head")
    mtp_layers: Natural = Field(default=0, description="layers that predict further tokens ahead, as in DeepSeek-V3")
    source: Text | None = None
    note: Text | None = None

    @field_validator("kv_heads", mode="before")
    @classmethod
    def _default_kv_heads(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("heads", 1) if value is None else value

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads")
        if heads is not None and heads % value:
            choices = nearest_numbers(value, divisors(heads))
            raise ValueError(f"kv_heads={value} does not divide heads={heads}; kv_heads can be {choices}")
        return value

    @field_validator("head_dim", mode="before")
    @classmethod
    def _default_head_dim(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            return value
        hidden, heads = info.data.get("hidden"), info.data.get("heads")
        if hidden is None or heads is None:
            return 1  # those fields have their own message
        if hidden % heads:
            choices = nearest_numbers(heads, divisors(hidden))
            raise ValueError(f"heads={heads} does not divide hidden={hidden}; heads can be {choices}, or give head_dim")
        return hidden // heads

    @field_validator("ffn", mode="before")
    @classmethod
    def _default_ffn(cls, value: Any, info: ValidationInfo) -> Any:
        return 4 * info.data.get("hidden", 1) if value is None else value

    def padded_vocab(self, tp: int = 1) -> int:
        """Rows of the word embedding: the vocabulary padded to a multiple of ``vocab_multiple x tp``.

        >>> Model(layers=1, hidden=8, heads=1, vocab=50257).padded_vocab(tp=8)
        51200
        """
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple

    def layer_parameters(self) -> LayerParameters:
        """One layer of the whole model.

        >>> Model(layers=96, hidden=12288, heads=96, vocab=50257).layer_parameters().total
        1812099072
        """
        query, key_value = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        wide = (2 if self.gated else 1) * self.ffn
        attention = self.hidden * (query + key_value) + query * self.hidden
        mlp = self.hidden * wide + self.ffn * self.hidden
        if self.bias:
            attention += query + key_value + self.hidden
            mlp += wide + self.hidden
        return LayerParameters(attention=attention, mlp=mlp, norms=2 * self.norm_parameters)

    @property
    def norm_parameters(self) -> int:
        """One norm: weight and bias, or the weight alone."""
        return (2 if self.norm == "layer" else 1) * self.hidden

    def position_parameters(self, seq_len: int | None = None) -> int:
        """Learned positions; 0 for other kinds, and where neither the model nor ``seq_len`` says how many."""
        if self.positions != "learned":
            return 0
        return (self.max_positions or seq_len or 0) * self.hidden

    def parameters(self, tp: int = 1, seq_len: int | None = None) -> ParameterCount:
        """The whole model, each parameter once, with the vocabulary padded for ``tp``.

        >>> llama = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, gated=True,
        ...               tied=False, positions="rotary", norm="rms", bias=False)
        >>> llama.parameters().total
        8030261248
        """
        words = self.padded_vocab(tp) * self.hidden
        return ParameterCount(
            embedding=words + (self.norm_parameters if self.embedding_norm else 0),
            positions=self.position_parameters(seq_len),
            layers=self.layers * self.layer_parameters().total,
            final_norm=self.norm_parameters,
            head=0 if self.tied else words,
        )

    def rank_kv_heads(self, tp: int) -> int:
        """Key and value heads on one rank; with more ranks than heads each rank holds a copy of one."""
        return -(-self.kv_heads // tp)

    def rank_layer_parameters(self, tp: int) -> int:
        """One layer on one tensor-parallel rank.

        >>> Model(layers=96, hidden=12288, heads=96, vocab=50257).rank_layer_parameters(tp=4)
        453080064
        """
        query, key_value = self.heads * self.head_dim // tp, 2 * self.rank_kv_heads(tp) * self.head_dim
        ffn = self.ffn // tp
        wide = (2 if self.gated else 1) * ffn
        matrices = self.hidden * (query + key_value) + query * self.hidden + self.hidden * wide + ffn * self.hidden
        biases = query + key_value + wide + 2 * self.hidden if self.bias else 0
        return matrices + biases + 2 * self.norm_parameters

    def layer_share(self, layer: int, tp: int, ep: int = 1, etp: int | None = None) -> RankParameters:
        """One layer on one rank."""
        return RankParameters(self.rank_layer_parameters(tp))

    def rank_embedding_parameters(self, tp: int, seq_len: int | None = None) -> int:
        """The embedding on one rank of the first stage: its shard of the words, all positions, the embedding norm."""
        norm = self.norm_parameters if self.embedding_norm else 0
        return self.rank_word_parameters(tp) + self.position_parameters(seq_len) + norm

    def rank_word_parameters(self, tp: int) -> int:
        """One rank's shard of the word embedding."""
        return self.padded_vocab(tp) // tp * self.hidden

    def rank_head_parameters(self, tp: int, seq_len: int | None = None, whole_embedding: bool = False) -> int:
        """The output head on one rank of the last stage: its own shard, or a copy of the tied one.

        Args:
            tp: Tensor-parallel degree.
            seq_len: Learned positions where the model does not say how many.
            whole_embedding: The tied copy is that of the whole embedding, with positions and
                embedding norm, as DeepSpeed's pipeline makes it; else the words alone.
        """
        if self.tied and whole_embedding:
            return self.rank_embedding_parameters(tp, seq_len)
        return self.rank_word_parameters(tp)

    def rank_final_norm_parameters(self) -> int:
        """The norm before the head, the same on every rank of the last stage."""
        return self.norm_parameters


def divisors(number: int) -> list[int]:
    """All divisors, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def model_names() -> list[str]:
    """The bundled models."""
    return bundled("models")


def load_model(name_or_path: str) -> Model:
    """A bundled model, or one from a file.

    >>> load_model("gpt-175b").layers
    96

    Raises:
        InputError: If there is no such model or its file is wrong.
    """
    document, where = model_document(name_or_path)
    return build(Model, document, where)


def model_document(name_or_path: str) -> tuple[dict[str, Any], str]:
    """The fields of a model by name or path, not yet validated, and the name for its errors."""
    document, where = read(name_or_path, "models", "model")
    if "architectures" in document or "model_type" in document:
        raise input_error(
            "is a Hugging Face config.json, which is not read yet; write its fields as a model: "
            "layers, hidden, heads, kv_heads, ffn, vocab, gated, tied, positions, norm, bias",
            where=where,
        )
    return document, where
