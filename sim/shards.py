"""What one rank holds of a model, and the buffers that its replicas exchange once a step."""

from __future__ import annotations

from ..scenarios.scenario import Scenario
from .ops import ELEMENT_BYTES


def rank_parameters(scenario: Scenario, stage: int, layers: int) -> int:
    """Parameters of one rank of a stage; the last stage holds its own copy of a tied embedding."""
    model, layout = scenario.model, scenario.layout
    count = layers * model.rank_layer_parameters(layout.tp)
    if stage == 0:
        count += model.rank_embedding_parameters(layout.tp, scenario.training.seq_len)
    if stage == layout.pp - 1:
        count += model.rank_final_norm_parameters()
        if layout.pp > 1 or not model.tied:
            count += head_parameters(scenario)
    return count


def head_parameters(scenario: Scenario) -> int:
    """Parameters of a rank's head: its own, or the copy of a tied embedding that its framework keeps there."""
    return scenario.model.rank_head_parameters(
        scenario.layout.tp, scenario.training.seq_len, scenario.framework.tied_copy == "embedding"
    )


def stage_parameters(scenario: Scenario) -> tuple[int, ...]:
    """Parameters of one rank of each stage."""
    layers = scenario.layout.layers_by_stage(scenario.model.layers)
    return tuple(rank_parameters(scenario, stage, count) for stage, count in enumerate(layers))


def reduce_op(scenario: Scenario) -> str:
    """How gradients are reduced over the replicas: with ZeRO-1 a framework may scatter the sum."""
    if scenario.layout.zero >= 1 and scenario.framework.reduce.collective == "reduce_scatter":
        return "reduce_scatter"
    return "all_reduce"


def reduce_bytes(scenario: Scenario, parameters: int) -> float:
    """Gradient buffer of a rank that data parallelism reduces."""
    return float(parameters * scenario.framework.reduce.bytes[scenario.training.precision])


def gather_bytes(scenario: Scenario, parameters: int) -> float:
    """Parameter buffer that ZeRO-1 gathers after the optimizer; 0 without it."""
    return float(parameters * ELEMENT_BYTES[scenario.training.precision]) if scenario.layout.zero >= 1 else 0.0


def embedding_bytes(scenario: Scenario) -> float:
    """Gradient buffer that the two copies of a tied embedding reduce; 0 where there is one copy."""
    if not scenario.model.tied or scenario.layout.pp == 1:
        return 0.0
    return float(head_parameters(scenario) * scenario.framework.tied_reduce_bytes[scenario.training.precision])
