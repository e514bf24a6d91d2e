"""FLOP of a whole step, as rates and utilisation are told by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..scenarios.model import Model
from .ops import Shapes


@dataclass(frozen=True)
class FlopCount:
    """FLOP of one whole step of the whole job: of the model, and with what is recomputed."""

    model: float
    hardware: float


def step_flop(shapes: Shapes, recompute: Sequence[str], layers: Sequence[int]) -> FlopCount:
    """FLOP of a step, attention counted in full (no causal discount), the backward pass as twice the forward.

    The convention of Narayanan et al. 2021, arXiv 2104.04473, appendix: for full recomputation and a
    GPT layer the hardware count is ``96 B s l h^2 (1 + s/6h + V/16lh)``. Of routed experts those count that a
    token goes through.

    Args:
        shapes: The scenario's shapes.
        recompute: Mode of each stage.
        layers: Layers of each stage, in the model's order.
    """
    model, training, layout = shapes.model, shapes.training, shapes.layout
    tokens = float(training.global_batch * training.seq_len)
    attention = 2.0 * tokens * training.seq_len * model.heads * (shapes.query_dim + shapes.value_dim)
    whole = {moe: 2.0 * tokens * width + attention for moe, width in _widths(model).items()}
    head = 2.0 * tokens * model.hidden * model.padded_vocab(layout.tp)
    partial = {moe: _selective(shapes, tokens, attention, moe) for moe in whole}
    forward, again, layer = 0.0, 0.0, 0
    for count, mode in zip(layers, recompute, strict=True):
        most = min(layout.recompute_layers or count, count)
        for number in range(count):
            moe = model.has_experts(layer)
            forward += whole[moe]
            if mode != "none" and number < most:
                again += whole[moe] if mode == "full" else partial[moe]
            layer += 1
    if model.mtp_layers:
        last = model.has_experts(model.layers - 1)
        merging = 2.0 * tokens * 2 * model.hidden**2
        forward += model.mtp_layers * (whole[last] + head + merging)
    return FlopCount(model=3.0 * (forward + head), hardware=3.0 * (forward + head) + again)


def _widths(model: Model) -> dict[bool, int]:
    """Elements of the matrices that a token is multiplied by, of each kind of layer that the model has."""
    return {model.has_experts(layer): model.matrix_parameters(layer) for layer in reversed(range(model.layers))}


def _selective(shapes: Shapes, tokens: float, attention: float, moe: bool) -> float:
    """What selective recomputation runs again of a layer's products."""
    model, chosen = shapes.model, shapes.layout.recompute_ops
    flop = attention if "attention" in chosen else 0.0
    if moe and "experts" in chosen:
        matrices = (3 if model.gated else 2) * model.hidden * model.expert_width
        flop += 2.0 * tokens * ((model.top_k or 1) * matrices + model.hidden * (model.experts or 0))
    return flop
