"""What a rank holds from step to step: weights, gradients, optimizer state, and the buffers beside them.

Sources: Rajbhandari et al. 2020, arXiv 1910.02054, section 5 (what each stage of ZeRO shards); Zhao et al. 2023,
arXiv 2304.11277, sections 3 and 4 (units that are gathered, prefetched and reduced); Wang et al. 2023,
arXiv 2306.10209, section 3 (secondary shards).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..scenarios.model import RankParameters
from ..scenarios.scenario import Scenario
from .activations import Sizes, Step, dummy_bytes, unit_elements
from .ops import ELEMENT_BYTES
from .shards import by_unit, embedding_with_head, expert_replicas, shard_copies, shard_members, state_bytes


@dataclass(frozen=True)
class StateSizes:
    """Bytes that stay on a rank.

    Attributes:
        parameters: Weights, or this rank's shard of them.
        gradients: Gradients and their accumulation, or this rank's shard.
        optimizer: Optimizer state of this rank.
        buffers: What else stays allocated.
        units: Weights of sharded units while they are whole; there during the passes only.
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
    states, habits = state_bytes(scenario), framework.memory
    sizes = Sizes(scenario.model, training, layout)
    dense = shard_members(scenario)
    expert = max(expert_replicas(scenario) // shard_copies(scenario), 1)

    def held(bytes_each: float, stage: int) -> float:
        if layout.zero < stage:
            return bytes_each * parameters.total
        return bytes_each * (parameters.dense / dense + parameters.expert / expert)

    buffers = dummy_bytes(layers, sizes.element) if habits.dummy_gradients else 0.0
    if habits.gather_buffer and layout.sequence_parallel and layout.tp > 1:
        buffers += sizes.gathered
    if layout.secondary_shards:
        buffers += sizes.element * parameters.total / layout.secondary_shards
    shard = held(1.0, 1)
    return StateSizes(
        # Weights that each pass makes whole unit by unit stay in shards between the passes, in ZeRO-2 too.
        parameters=held(states.weight, 2 if by_unit(scenario) else 3),
        gradients=held(states.gradient + states.accumulation, 2),
        optimizer=0.0 if layout.offload_optimizer else held(states.optimizer, 1),
        buffers=buffers,
        units=_units(scenario, parameters, layers, head + first),
        optimizer_work=0.0 if layout.offload_optimizer else habits.optimizer_work * shard,
    )


def _units(scenario: Scenario, parameters: RankParameters, layers: Sequence[Sequence[Step]], ends: int) -> float:
    """The weights of sharded units that are whole at once.

    The largest unit and those gathered ahead of it, or all of them where none is given up between the passes; with
    them all the time a tied embedding, whose unit is not given up; and
    the gradients of all where the last micro-batch of a pipeline reduces them.
    """
    layout, training, framework = scenario.layout, scenario.training, scenario.framework
    reduce = framework.reduce
    element = float(ELEMENT_BYTES[training.precision])
    everything = element * parameters.total
    if not by_unit(scenario):  # weights made from the fp32 ones for the passes, where no others stay
        return everything if state_bytes(scenario).weight == 0 else 0.0
    sizes = Sizes(scenario.model, training, layout)
    words = sizes.vocab * scenario.model.hidden
    stays = words if embedding_with_head(scenario) and framework.sharding.keeps_last else 0
    units = sorted([unit_elements(steps) for steps in layers] + ([] if stays else [words] * ends))[::-1]
    given_up = layout.zero == 3 and layout.reshard_after_forward
    whole = element * (stays + sum(units[: 1 + layout.prefetch])) if given_up else everything
    sent = reduce.bytes[training.precision]
    once = layout.pp > 1 and not reduce.each_in_pipeline
    return whole + (sent * parameters.total if once else 0.0)
