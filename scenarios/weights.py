"""The weights of a transformer layer, and which share of each a rank holds.

One list serves every count: of the whole model, of one rank, and of what a token
passes through. Megatron's tensor parallelism cuts a column-parallel matrix with
its bias; a row-parallel matrix is cut and its bias is not; norms, routers and the
narrow projections of latent attention are whole on every rank.

Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (the cut); DeepSeek-AI 2024,
arXiv 2405.04434, sections 2.1 and 2.2 (latent attention, shared experts).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .model_fields import ModelFields

Part = Literal["attention", "mlp", "experts", "norms"]
Cut = Literal["whole", "tp", "kv", "expert", "expert_whole"]


class Weight(NamedTuple):
    """One weight, or several that are cut alike.

    Attributes:
        part: What it belongs to; ``experts`` are the routed ones, shared ones are ``mlp``.
        elements: Of the whole model.
        cut: ``whole``: on every rank; ``tp``: in tp parts; ``kv``: by key and value heads, one at
            least on each rank; ``expert``: experts over ep ranks, each in etp parts; ``expert_whole``:
            experts over ep ranks, each whole.
        matrix: Tokens are multiplied by it; else it is a bias or a norm.
    """

    part: Part
    elements: int
    cut: Cut
    matrix: bool = False


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer of the whole model, biases included.

    ``mlp`` is the plain MLP, or the router and the shared experts; ``experts`` are the routed ones.
    """

    attention: int
    mlp: int
    norms: int
    experts: int = 0

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.attention + self.mlp + self.norms + self.experts


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model by part; ``head`` is 0 where it is tied to the embedding."""

    embedding: int
    positions: int
    layers: int
    final_norm: int
    head: int
    mtp: int = 0

    @property
    def total(self) -> int:
        """All parts, each counted once."""
        return self.embedding + self.positions + self.layers + self.final_norm + self.head + self.mtp


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


def layer_weights(model: ModelFields, experts: bool) -> list[Weight]:
    """All weights of one layer, with a plain MLP or with experts."""
    norms = Weight("norms", model.layer_norms * model.norm_parameters, "whole")
    return [*attention_weights(model), *(expert_weights(model) if experts else mlp_weights(model, model.ffn)), norms]


def attention_weights(model: ModelFields) -> list[Weight]:
    """Projections of one layer's attention, their biases, and the norms inside it."""
    if model.kv_rank is not None:
        return latent_weights(model)
    hidden, query, key_value = model.hidden, model.query_width, 2 * model.kv_heads * model.head_dim
    weights = [
        Weight("attention", hidden * query, "tp", matrix=True),
        Weight("attention", hidden * key_value, "kv", matrix=True),
        Weight("attention", query * hidden, "tp", matrix=True),
    ]
    if model.bias or model.qkv_bias:
        weights += [Weight("attention", query, "tp"), Weight("attention", key_value, "kv")]
    if model.bias:
        weights.append(Weight("attention", hidden, "whole"))
    return [*weights, *head_norm_weights(model)]


def head_norm_weights(model: ModelFields) -> list[Weight]:
    """Norms of queries and keys, the same for every head; of a tensor rank they see its own heads only."""
    if not model.qk_norm or model.kv_rank is not None:
        return []
    return [Weight("attention", 2 * model.norm_width(model.head_dim), "whole")]


def latent_weights(model: ModelFields) -> list[Weight]:
    """Multi-head latent attention: down to the latents on every rank, up from them cut by heads."""
    assert model.kv_rank is not None and model.rope_dim is not None
    hidden, query, values = model.hidden, model.query_width, model.value_width
    keys = query - model.heads * model.rope_dim  # the rotary part of a key comes straight from the input
    weights = [
        Weight("attention", hidden * (model.kv_rank + model.rope_dim), "whole", matrix=True),
        Weight("attention", model.norm_width(model.kv_rank), "whole"),
        Weight("attention", model.kv_rank * (keys + values), "tp", matrix=True),
        Weight("attention", values * hidden, "tp", matrix=True),
    ]
    if model.q_rank is None:
        return [*weights, Weight("attention", hidden * query, "tp", matrix=True)]
    return [
        *weights,
        Weight("attention", hidden * model.q_rank, "whole", matrix=True),
        Weight("attention", model.norm_width(model.q_rank), "whole"),
        Weight("attention", model.q_rank * query, "tp", matrix=True),
    ]


def mlp_weights(model: ModelFields, width: int) -> list[Weight]:
    """A plain MLP."""
    wide = (2 if model.gated else 1) * width
    weights = [
        Weight("mlp", model.hidden * wide, "tp", matrix=True),
        Weight("mlp", width * model.hidden, "tp", matrix=True),
    ]
    if model.bias:
        weights += [Weight("mlp", wide, "tp"), Weight("mlp", model.hidden, "whole")]
    return weights


def expert_weights(model: ModelFields) -> list[Weight]:
    """Router, routed experts, and the shared ones."""
    assert model.experts is not None
    width, wide = model.expert_width, (2 if model.gated else 1) * model.expert_width
    weights = [
        Weight("mlp", model.hidden * model.experts, "whole", matrix=True),
        Weight("experts", model.experts * model.hidden * wide, "expert", matrix=True),
        Weight("experts", model.experts * width * model.hidden, "expert", matrix=True),
    ]
    if model.bias:
        weights += [
            Weight("mlp", model.experts, "whole"),
            Weight("experts", model.experts * wide, "expert"),
            Weight("experts", model.experts * model.hidden, "expert_whole"),
        ]
    if model.shared_experts:
        weights += mlp_weights(model, model.shared_width)
    if model.shared_gate:
        weights.append(Weight("mlp", model.hidden, "whole", matrix=True))
    return weights


def mtp_weights(model: ModelFields) -> list[Weight]:
    """What a layer that predicts a further token has beside the layer itself.

    Norms of its two inputs and of its output, and the projection of both inputs side by side.
    Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2; embedding and head are the model's own.
    """
    return [
        Weight("norms", 3 * model.norm_parameters, "whole"),
        Weight("mlp", 2 * model.hidden * model.hidden, "tp", matrix=True),
    ]


def by_part(weights: Iterable[Weight]) -> LayerParameters:
    """Elements of the whole model, by part."""
    parts: dict[Part, int] = {"attention": 0, "mlp": 0, "norms": 0, "experts": 0}
    for weight in weights:
        parts[weight.part] += weight.elements
    return LayerParameters(**parts)


def rank_share(weights: Iterable[Weight], model: ModelFields, tp: int, ep: int, etp: int) -> RankParameters:
    """Elements on one rank."""
    dense = expert = 0
    held = -(-(model.experts or 1) // ep)  # experts on a rank
    for weight in weights:
        match weight.cut:
            case "whole":
                dense += weight.elements
            case "tp":
                dense += weight.elements // tp
            case "kv":
                dense += weight.elements // model.kv_heads * model.rank_kv_heads(tp)
            case "expert":
                expert += weight.elements // (model.experts or 1) * held // etp
            case "expert_whole":
                expert += weight.elements // (model.experts or 1) * held
    return RankParameters(dense, expert)


def whole_elements(weights: Iterable[Weight]) -> int:
    """Elements that every tensor-parallel rank holds whole, those of experts aside."""
    return sum(weight.elements for weight in weights if weight.cut == "whole")


def token_share(weights: Iterable[Weight], model: ModelFields, matrices: bool = False) -> int:
    """Elements that one token passes through: ``top_k`` of the routed experts and all else.

    Args:
        weights: Of a layer.
        model: Its model.
        matrices: Only what tokens are multiplied by, so that twice the number is FLOP a token.
    """
    whole = routed = 0
    for weight in weights:
        if weight.matrix or not matrices:
            if weight.part == "experts":
                routed += weight.elements
            else:
                whole += weight.elements
    return whole + (routed // model.experts * (model.top_k or 0) if model.experts else 0)
