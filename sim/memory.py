"""Memory as a level over time: what a stage holds, and its peak.

States (weights, gradients, optimizer) stay; each forward adds what its micro-batch
keeps for the backward, each backward frees it; while an action runs its working set
comes on top. The peak follows from the order of the actions.

Source of the bytes a layer keeps: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1,
generalised to grouped queries, gated layers and absent dropout. Checked against the
published per-stage logs of two 175B runs (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..scenarios.result import Memory, MemoryParts, StageMemory, Verdict
from ..scenarios.scenario import Scenario
from ..scenarios.schedules import BACKWARD, KINDS, action_of
from .calibration import Calibration
from .costs import JobCost
from .ops import MASK_BYTES, Shapes
from .timeline import Program, Timeline


def layer_kept_bytes(shapes: Shapes) -> float:
    """Bytes that one layer keeps from forward to backward without recomputation, its input included."""
    e, hidden, tokens, model = shapes.element, shapes.hidden_elements, shapes.tokens, shapes.model
    training = shapes.training
    kept = 4.0 * hidden * e  # inputs of both norms, and what both norms hand on
    kept += tokens * (2 * shapes.rank_query + 2 * shapes.rank_kv) * e  # queries, keys, values, projection's input
    kept += attention_kept_bytes(shapes)
    ffn_in = (2 if model.gated else 1) * shapes.rank_ffn
    kept += tokens * (ffn_in + shapes.rank_ffn) * e
    if training.hidden_dropout > 0:
        kept += 2 * hidden * MASK_BYTES
    return kept


def attention_kept_bytes(shapes: Shapes) -> float:
    """The part of it that attention alone keeps, which selective recomputation gives up."""
    if shapes.layout.flash_attention:
        return 4.0 * shapes.tokens * shapes.rank_heads  # one fp32 statistic a row and head
    kept = float(shapes.score_elements * shapes.element)
    if shapes.training.attention_dropout > 0:
        kept += shapes.score_elements * (shapes.element + MASK_BYTES)
    return kept


@dataclass(frozen=True)
class StageBytes:
    """What the actions of one stage hold.

    Attributes:
        parameters: Weights.
        gradients: Gradients and their accumulation.
        optimizer: Optimizer state of this rank.
        kept: A micro-batch's activations from its forward to its backward.
        forward_work: Working set of a forward.
        head_work: Working set of a backward while it is in the head; 0 elsewhere.
        layer_work: Activations of the layer that is recomputed.
        gradient_work: Gradients on their way through a layer.
        head_kept: The part of ``kept`` that the head's backward frees before the layers run.
    """

    parameters: float
    gradients: float
    optimizer: float
    kept: float
    forward_work: float
    head_work: float
    layer_work: float
    gradient_work: float
    head_kept: float

    @property
    def states(self) -> float:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer


def stage_bytes(scenario: Scenario, stage: int, layers: int, mode: str, parameters: int) -> StageBytes:
    """What one rank of a stage holds."""
    shapes = Shapes(scenario.model, scenario.training, scenario.layout)
    layout, training, model = scenario.layout, scenario.training, scenario.model
    states = scenario.framework.states[training.precision]
    e, hidden = shapes.element, shapes.hidden_elements
    assert layout.dp is not None
    shard = layout.dp if layout.zero >= 1 else 1
    whole = layer_kept_bytes(shapes)
    kept_layer = {"none": whole, "selective": whole - attention_kept_bytes(shapes), "full": float(hidden * e)}[mode]
    kept = layers * kept_layer
    if stage > 0 and scenario.framework.pipeline.partition_over_tp:
        kept += hidden * e / layout.tp  # the message as it came, beside the gathered one
    if stage == 0:
        kept += hidden * MASK_BYTES if training.hidden_dropout > 0 else 0
        kept += hidden * e if model.embedding_norm else 0
    head_kept = head_work = 0.0
    if stage == layout.pp - 1:
        logits = shapes.tokens * shapes.rank_vocab
        head_kept = 2.0 * hidden * e + 4.0 * logits  # final norm's input and output, softmax in fp32
        head_work = logits * (4.0 + e) + shapes.rank_vocab * model.hidden * e + hidden * e
    matrices = [model.hidden * shapes.rank_ffn, model.hidden * (shapes.rank_query + 2 * shapes.rank_kv)]
    scores = 0 if layout.flash_attention else shapes.score_elements
    return StageBytes(
        parameters=float(parameters * states.weight),
        gradients=float(parameters * (states.gradient + states.accumulation)),
        optimizer=parameters * states.optimizer / shard,
        kept=kept + head_kept,
        forward_work=2.0 * scores * e + 3.0 * hidden * e,
        head_work=head_work,
        layer_work=whole - kept_layer,
        gradient_work=hidden * e + max(matrices) * e,
        head_kept=head_kept,
    )


@dataclass(frozen=True)
class _Peak:
    level: float
    held: float
    work: float
    gradient: float
    index: int


def _peak(codes: Sequence[int], sizes: StageBytes) -> _Peak:
    """The highest level of a stage; of several equal ones the first."""
    backward = np.asarray(codes) % KINDS == BACKWARD
    change = np.where(backward, -1, 1)
    in_flight = np.cumsum(change) + backward  # while the action runs
    best = _Peak(-1.0, 0.0, 0.0, 0.0, 0)
    phases = (
        (~backward, 0.0, sizes.forward_work, 0.0),
        (backward, 0.0, 0.0, sizes.head_work),
        (backward, sizes.head_kept, sizes.layer_work, sizes.gradient_work),
    )
    for when, freed, work, gradient in phases:
        most = np.where(when, in_flight, 0)
        index = int(np.argmax(most))
        held = float(most[index]) * sizes.kept - freed
        if held + work + gradient > best.level:
            best = _Peak(held + work + gradient, held, work, gradient, index)
    return best


def memory_of(
    scenario: Scenario, calibration: Calibration, cost: JobCost, program: Program, timeline: Timeline
) -> Memory:
    """The memory of every stage and the verdict.

    A layout fits where the peak, the allocator's usual reserve above it and what lies
    outside the allocator stay within the device; it is marginal where only the peak
    and what lies outside do.
    """
    figures = calibration.memory
    capacity = scenario.machine.device.memory_bytes
    context, reserve = figures.context.value, figures.reserve.value
    layout = scenario.layout
    stages = []
    plan = zip(layout.layers_by_stage(scenario.model.layers), layout.recompute_by_stage(), strict=True)
    for stage, (layers, mode) in enumerate(plan):
        sizes = stage_bytes(scenario, stage, layers, mode, cost.stages[stage].parameters)
        peak = _peak(program.table[stage], sizes)
        action = action_of(program.table[stage][peak.index], stage)
        kind = "forward" if action.kind == "F" else "backward"
        starts = timeline.start[stage]
        top = sizes.states + peak.level
        stages.append(
            StageMemory(
                stage=stage,
                peak_bytes=top,
                reserved_bytes=max(top, min(top + reserve, capacity - context)),
                peak_s=starts[peak.index] if starts else 0.0,
                peak_during=f"{kind} of micro-batch {action.micro_batch}",
                parts=MemoryParts(
                    parameters=sizes.parameters,
                    gradients=sizes.gradients,
                    optimizer=sizes.optimizer,
                    activations=peak.held + peak.work,
                    buffers=peak.gradient,
                ),
                between_steps_bytes=sizes.states,
            )
        )
    worst = max(stage.peak_bytes for stage in stages)
    verdict: Verdict = "does not fit"
    if worst + reserve + context <= capacity:
        verdict = "fits"
    elif worst + context <= capacity:
        verdict = "marginal"
    return Memory(verdict, capacity, context, tuple(stages))
