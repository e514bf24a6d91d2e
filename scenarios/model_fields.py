"""The fields of a model, and the rules they keep among themselves.

What the parts weigh is in `model`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..topology.errors import nearest_numbers
from .fields import Count, Derived, Extent, Flag, Natural, Text


class ModelFields(BaseModel):
    """What describes a model; `Model` counts what it weighs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text = "inline"
    layers: Count = Field(description="transformer layers")
    hidden: Count = Field(description="width of the residual stream")
    heads: Count = Field(description="attention heads")
    kv_heads: Derived = Field(default=None, validate_default=True, description="key and value heads; left out: heads")
    head_dim: Derived = Field(
        default=None,
        validate_default=True,
        description="width of a query or key head, its rotary part included; left out: hidden / heads",
    )
    ffn: Derived = Field(default=None, validate_default=True, description="width of the MLP; left out: 4 x hidden")
    vocab: Extent = Field(description="tokens in the vocabulary, before padding")
    vocab_multiple: Count = Field(default=128, description="the vocabulary is padded to a multiple of this x tp")
    gated: Flag = Field(default=False, description="a gated MLP (SwiGLU): three matrices in place of two")
    tied: Flag = Field(default=True, description="the output head shares the word embedding")
    head_bias: Flag = Field(default=False, description="the output head carries a bias, as in GPT-J and Phi")
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    max_positions: Extent | None = Field(
        default=None, description="learned positions; left out: the training's seq_len"
    )
    norm: Literal["layer", "rms"] = "layer"
    norm_bias: Flag = Field(default=True, description="layer norms carry a bias beside their weight")
    layer_norms: Literal[1, 2, 4] = Field(
        default=2, description="norms of a layer: 1 where parallel blocks share it, 4 where outputs are normed too"
    )
    bias: Flag = Field(default=True, description="linear layers carry biases")
    qkv_bias: Flag = Field(default=False, description="the query, key and value projections alone carry biases")
    qk_norm: Flag = Field(default=False, description="queries and keys are normed by head")
    parallel_blocks: Flag = Field(default=False, description="attention and MLP read the same input, as in Falcon")
    embedding_norm: Flag = Field(default=False, description="a norm follows the embedding, as in BLOOM")
    experts: Count | None = Field(default=None, description="routed experts of a mixture-of-experts layer")
    top_k: Count | None = Field(
        default=None, validate_default=True, description="routed experts that a token goes through"
    )
    expert_ffn: Extent | None = Field(
        default=None, validate_default=True, description="width of one expert's MLP; left out: ffn"
    )
    shared_experts: Natural = Field(default=0, description="experts that every token goes through")
    shared_ffn: Extent | None = Field(
        default=None, description="width of all shared experts together; left out: shared_experts x expert_ffn"
    )
    shared_gate: Flag = Field(default=False, description="the shared experts' output is gated, as in Qwen2-MoE")
    dense_layers: Natural = Field(default=0, description="first layers that have a plain MLP of width ffn")
    moe_every: Count = Field(
        default=1, description="one layer in so many has experts: the last of each so many, from the first layer on"
    )
    kv_rank: Extent | None = Field(
        default=None, description="latent attention: width of the compressed keys and values"
    )
    q_rank: Extent | None = Field(default=None, description="latent attention: width of the compressed queries")
    rope_dim: Extent | None = Field(
        default=None, validate_default=True, description="latent attention: rotary part of a query or key head"
    )
    v_head_dim: Extent | None = Field(
        default=None,
        validate_default=True,
        description="latent attention: width of a value head; left out: head_dim - rope_dim",
    )
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

    @field_validator("top_k")
    @classmethod
    def _top_k_of_the_experts(cls, value: int | None, info: ValidationInfo) -> int | None:
        experts = info.data.get("experts")
        if experts is not None and value is None:
            raise ValueError(f"is needed with experts={experts}: how many of them a token goes through, 1 to {experts}")
        if experts is not None and value is not None and value > experts:
            raise ValueError(f"top_k={value} is more than the {experts} experts; it can be 1 to {experts}")
        return _of_experts("top_k", value, info)

    @field_validator("expert_ffn")
    @classmethod
    def _default_expert_ffn(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None and info.data.get("experts") is not None:
            return info.data.get("ffn")
        return _of_experts("expert_ffn", value, info)

    @field_validator("shared_experts", "shared_gate", "dense_layers")
    @classmethod
    def _belongs_to_experts(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        _of_experts(name, value or None, info)
        if name == "shared_gate" and value and info.data.get("shared_experts") == 0:
            raise ValueError("is of shared experts; set shared_experts too")
        layers = info.data.get("layers")
        if name == "dense_layers" and layers is not None and value >= layers:
            raise ValueError(
                f"dense_layers={value} leaves none of the {layers} layers to experts; it can be 0 to {layers - 1}"
            )
        return value

    @field_validator("shared_ffn")
    @classmethod
    def _shared_ffn_of_shared_experts(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("shared_experts") == 0:
            raise ValueError(f"shared_ffn={value} is of shared experts; set shared_experts too")
        return value

    @field_validator("moe_every")
    @classmethod
    def _some_layer_has_experts(cls, value: int, info: ValidationInfo) -> int:
        layers = info.data.get("layers")
        _of_experts("moe_every", value if value > 1 else None, info)
        if layers is not None and value > layers:
            raise ValueError(f"moe_every={value} leaves no layer with experts; it can be 1 to {layers}")
        return value

    @field_validator("kv_rank")
    @classmethod
    def _latent_heads_are_all_alike(cls, value: int | None, info: ValidationInfo) -> int | None:
        heads, kv_heads = info.data.get("heads"), info.data.get("kv_heads")
        if value is not None and None not in (heads, kv_heads) and heads != kv_heads:
            raise ValueError(f"latent attention has a key for each of the {heads} heads; leave kv_heads={kv_heads} out")
        return value

    @field_validator("q_rank", "rope_dim", "v_head_dim")
    @classmethod
    def _belongs_to_latent_attention(cls, value: int | None, info: ValidationInfo) -> int | None:
        name, latent = info.field_name, info.data.get("kv_rank")
        if latent is None:
            if value is not None and "kv_rank" in info.data:
                raise ValueError(f"{name}={value} is of latent attention; set kv_rank too")
            return value
        head_dim, rope_dim = info.data.get("head_dim"), info.data.get("rope_dim")
        if name == "rope_dim" and value is None:
            raise ValueError(f"is needed with kv_rank={latent}: the part of head_dim that is rotary")
        if name == "rope_dim" and value is not None and head_dim is not None and value >= head_dim:
            raise ValueError(
                f"rope_dim={value} is not less than head_dim={head_dim}, which counts the rotary part too; "
                f"it can be 1 to {head_dim - 1}, or give head_dim"
            )
        if name == "v_head_dim" and value is None and head_dim is not None and rope_dim is not None:
            return int(head_dim - rope_dim)
        return value

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.experts is not None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0 (or back from -1), has experts in place of a plain MLP.

        >>> mixed = ModelFields(layers=6, hidden=8, heads=1, vocab=9, experts=4, top_k=2, dense_layers=2, moe_every=2)
        >>> [mixed.has_experts(layer) for layer in range(6)]
        [False, False, False, True, False, True]
        """
        layer = layer + self.layers if layer < 0 else layer
        return self.is_moe and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    @property
    def query_width(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of what attention gives to its output projection."""
        return self.heads * (self.v_head_dim or self.head_dim)

    @property
    def expert_width(self) -> int:
        """Width of one routed expert's MLP."""
        return self.expert_ffn or self.ffn

    @property
    def shared_width(self) -> int:
        """Width of the shared experts together, 0 without."""
        return self.shared_ffn or self.shared_experts * self.expert_width

    @property
    def norm_parameters(self) -> int:
        """One norm: weight and bias, or the weight alone."""
        return self.norm_width(self.hidden)

    def norm_width(self, width: int) -> int:
        """Parameters of a norm over so many elements."""
        return (2 if self.norm == "layer" and self.norm_bias else 1) * width

    def rank_kv_heads(self, tp: int) -> int:
        """Key and value heads on one rank; with more ranks than heads each rank holds a copy of one."""
        return -(-self.kv_heads // tp)


def _of_experts(name: str, value: int | None, info: ValidationInfo) -> int | None:
    """The value, if the model has experts to which it can belong."""
    if value is not None and "experts" in info.data and info.data["experts"] is None:
        raise ValueError(f"{name}={value} is of a mixture of experts; set experts too")
    return value


def divisors(number: int) -> list[int]:
    """All divisors, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
