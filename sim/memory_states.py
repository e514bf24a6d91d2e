"""What a rank holds from step to step: weights, gradients, optimizer state, and the buffers beside them.

Sources: Rajbhandari et al. 2020, arXiv 1910.02054, section 5 (what each stage of ZeRO shards); Zhao et al. 2023,
arXiv 2304.11277, sections 3 and 4 (units that are gathered, prefetched and reduced); Wang et al. 2023,
arXiv 2306.10209, section 3 (secondary shards).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..scenarios.framework import StateBytes
from ..scenarios.layout import Layout
from ..scenarios.model import RankParameters
from ..scenarios.scenario import Scenario
from ..scenarios.training import Training
from .activations import Sizes, Step, dummy_bytes, unit_elements
from .ops import ELEMENT_BYTES

FP32_BYTES = 4.0


@dataclass(frozen=True)
class StateSizes:
    """Bytes that stay on a rank.

    Attributes:
        parameters: Weights, or this rank's shard of them.
        gradients: Gradients and their accumulation, or this rank's shard.
        optimizer: Optimizer state of this rank.
        buffers: What else stays allocated.
        units: Weights and gradients of sharded units while they are whole; there during the passes only.
        optimizer_work: What only the optimizer's step takes.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    units: float = 0.0
    optimizer_work: float = 0.0

    @property
    def total(self) -> float:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def shard_sizes(layout: Layout) -> tuple[int, int]:
    """Ranks that share what ZeRO shards: of dense parameters, and of experts.

    >>> shard_sizes(Layout(tp=1, dp=8, ep=8, zero=1))
    (8, 1)
    """
    dp = layout.dp or 1
    dense = layout.shard_group or dp * layout.cp
    etp = layout.etp or layout.tp
    return dense, max(dense * layout.tp // (layout.ep * etp), 1)


def gradient_bytes(states: StateBytes, training: Training) -> float:
    """Bytes of a parameter's gradients: as the framework does, or as the training says it adds them up."""
    element = ELEMENT_BYTES[training.precision]
    if training.accumulate_fp32 is None:
        return states.gradient + states.accumulation
    if not training.accumulate_fp32:
        return float(element)
    return max(states.gradient + states.accumulation, FP32_BYTES)


def state_sizes(
    scenario: Scenario, parameters: RankParameters, layers: Sequence[Sequence[Step]], head: bool, first: bool
) -> StateSizes:
    """What one pipeline rank holds.

    Args:
        scenario: What is asked.
        parameters: All that the rank holds before ZeRO shards it.
        layers: Operations of its layers.
        head: Whether it has the output head.
        first: Whether it has the embedding.
    """
    layout, training, framework = scenario.layout, scenario.training, scenario.framework
    states, habits = framework.states[training.precision], framework.memory
    sizes = Sizes(scenario.model, training, layout)
    dense, expert = shard_sizes(layout)

    def held(bytes_each: float, stage: int) -> float:
        if layout.zero < stage:
            return bytes_each * parameters.total
        return bytes_each * (parameters.dense / dense + parameters.expert / expert)

    buffers = dummy_bytes(layers, sizes.element) if habits.dummy_gradients else 0.0
    if habits.gather_buffer and layout.sequence_parallel and layout.tp > 1:
        buffers += sizes.gathered
    weights, units = held(states.weight, 3), 0.0
    if layout.zero == 3:
        if layout.reshard_after_forward:
            units = _units(scenario, layers, head, first)
        else:
            buffers += sizes.element * parameters.total
            units = _units(scenario, layers, head, first, gathered=False)
        if layout.secondary_shards:
            buffers += sizes.element * parameters.total / layout.secondary_shards
    shard = held(1.0, 1)
    return StateSizes(
        parameters=weights,
        gradients=held(gradient_bytes(states, training), 2),
        optimizer=0.0 if layout.offload_optimizer else held(states.optimizer, 1),
        buffers=buffers,
        units=units,
        optimizer_work=0.0 if layout.offload_optimizer else habits.optimizer_work * shard,
    )


def _units(
    scenario: Scenario, layers: Sequence[Sequence[Step]], head: bool, first: bool, gathered: bool = True
) -> float:
    """The units of ZeRO-3 that are whole at once.

    The largest one, those that are gathered ahead of it, and the gradient of one as it is made and as it is sent.
    """
    layout, training = scenario.layout, scenario.training
    element = ELEMENT_BYTES[training.precision]
    sizes = Sizes(scenario.model, training, layout)
    ends = sizes.vocab * scenario.model.hidden
    units = sorted([unit_elements(steps) for steps in layers] + [ends] * (head + first), reverse=True)
    if not units:
        return 0.0
    ahead = sum(units[: 1 + layout.prefetch]) if gathered else 0
    sent = scenario.framework.reduce.bytes[training.precision]
    return element * (ahead + units[0]) + sent * units[0]
