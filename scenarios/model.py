"""What is trained: a decoder-only transformer, dense or with experts, and what its parts weigh.

Parameter counts are exact; `weights` lists what a layer is made of and how ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..topology.files import build
from .huggingface import is_config, model_fields
from .model_fields import ModelFields, divisors
from .reading import bundled, read
from .weights import (
    LayerParameters,
    ParameterCount,
    RankParameters,
    Weight,
    by_part,
    layer_weights,
    mtp_weights,
    rank_share,
    token_share,
)

__all__ = [
    "LayerParameters",
    "Model",
    "ParameterCount",
    "RankParameters",
    "divisors",
    "load_model",
    "model_document",
    "model_names",
]


class Model(ModelFields):
    """A decoder-only transformer: its fields, and the parameters they make.

    Fields left out: ``kv_heads`` is ``heads``, ``head_dim`` is ``hidden / heads``, ``ffn`` is ``4 x hidden``,
    ``expert_ffn`` is ``ffn``, ``v_head_dim`` is ``head_dim - rope_dim``; after validation they are numbers where
    the model has such parts.
    """

    def padded_vocab(self, tp: int = 1) -> int:
        """Rows of the word embedding: the vocabulary padded to a multiple of ``vocab_multiple x tp``.

        >>> Model(layers=1, hidden=8, heads=1, vocab=50257).padded_vocab(tp=8)
        51200
        """
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple

    def layer_weights(self, layer: int = -1) -> list[Weight]:
        """Every weight of a layer, with its part and its cut; the last layer where none is named."""
        return layer_weights(self, self.has_experts(layer))

    def layer_parameters(self, layer: int = -1) -> LayerParameters:
        """One layer of the whole model; the last, which has experts if any has, where none is named.

        >>> Model(layers=96, hidden=12288, heads=96, vocab=50257).layer_parameters().total
        1812099072
        """
        return by_part(self.layer_weights(layer))

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
        return self._count(tp, seq_len, lambda weights: by_part(weights).total)

    def active_parameters(self, tp: int = 1, seq_len: int | None = None) -> int:
        """Parameters that one token passes through: of the routed experts, ``top_k``; all else in full.

        >>> load_model("mixtral-8x7b").active_parameters()
        12879925248
        """
        return self._count(tp, seq_len, lambda weights: token_share(weights, self)).total

    def _count(self, tp: int, seq_len: int | None, of: Callable[[list[Weight]], int]) -> ParameterCount:
        with_experts = sum(self.has_experts(layer) for layer in range(self.layers))
        plain, routed = of(layer_weights(self, False)), of(layer_weights(self, True)) if with_experts else 0
        rows = self.padded_vocab(tp)
        words = rows * self.hidden
        return ParameterCount(
            embedding=words + (self.norm_parameters if self.embedding_norm else 0),
            positions=self.position_parameters(seq_len),
            layers=with_experts * routed + (self.layers - with_experts) * plain,
            final_norm=self.norm_parameters,
            head=(0 if self.tied else words) + (rows if self.head_bias else 0),
            mtp=self.mtp_layers * of(self.layer_weights() + mtp_weights(self)) if self.mtp_layers else 0,
        )

    def matrix_parameters(self, layer: int = -1) -> int:
        """Elements of a layer's matrices that a token is multiplied by; twice that is its FLOP forward,
        beside those of attention itself."""
        return token_share(self.layer_weights(layer), self, matrices=True)

    def routed_parameters(self, layer: int = -1) -> int:
        """The part of `matrix_parameters` that is the routed experts'."""
        return token_share((weight for weight in self.layer_weights(layer) if weight.part == "experts"), self, True)

    def layer_share(self, layer: int, tp: int, ep: int = 1, etp: int | None = None) -> RankParameters:
        """One layer on one rank.

        Args:
            layer: Which, from 0.
            tp: Tensor-parallel degree of all but the experts.
            ep: Ranks that the experts are spread over.
            etp: Tensor-parallel degree of the experts; left out: tp.

        >>> load_model("mixtral-8x7b").layer_share(0, tp=2, ep=4)
        RankParameters(dense=21012480, expert=176160768)
        """
        return rank_share(self.layer_weights(layer), self, tp, ep, tp if etp is None else etp)

    def mtp_share(self, tp: int, ep: int = 1, etp: int | None = None) -> RankParameters:
        """All layers for further tokens, on one rank of the stage that holds them (Megatron: the last)."""
        if not self.mtp_layers:
            return RankParameters(0)
        weights = (self.layer_weights() + mtp_weights(self)) * self.mtp_layers
        return rank_share(weights, self, tp, ep, tp if etp is None else etp)

    def rank_layer_parameters(self, tp: int, layer: int = 0) -> int:
        """One layer on one tensor-parallel rank, with all of its experts.

        >>> Model(layers=96, hidden=12288, heads=96, vocab=50257).rank_layer_parameters(tp=4)
        453080064
        """
        return self.layer_share(layer, tp).total

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
        bias = self.padded_vocab(tp) // tp if self.head_bias else 0
        if self.tied and whole_embedding:
            return self.rank_embedding_parameters(tp, seq_len) + bias
        return self.rank_word_parameters(tp) + bias

    def rank_final_norm_parameters(self) -> int:
        """The norm before the head, the same on every rank of the last stage."""
        return self.norm_parameters


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
    return (model_fields(document, where) if is_config(document) else document), where
