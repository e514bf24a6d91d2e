"""Memory as a level over time: what a pipeline rank holds, and its peak.

States (weights, gradients, optimizer) stay; each forward adds what its micro-batch
keeps for the backward, each backward frees it; while an action runs its working set
comes on top. The peak follows from the order of the actions. A schedule that splits
the backward frees in its first half all but what the gradients of the weights need.

Checked against published allocator peaks (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..scenarios.model import RankParameters
from ..scenarios.result import Memory, MemoryParts, StageMemory, Verdict
from ..scenarios.scenario import Scenario
from ..scenarios.schedules import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, load_schedule
from .activations import Sizes, Step, backward_bytes, deferred_bytes, kept_bytes, layer_steps, unit_elements
from .calibration import Calibration
from .costs import JobCost
from .memory_states import StateSizes, state_sizes
from .ops import MASK_BYTES
from .shards import by_unit, embedding_with_head
from .timeline import Floats, Program, Timeline
from .virtual_stages import in_pieces

LOSS_BYTES = 4  # the loss works in fp32
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRAD: "input gradient", WEIGHT_GRAD: "weight gradient"}


@dataclass(frozen=True)
class ChunkBytes:
    """What the actions of one virtual stage hold, a micro-batch.

    Attributes:
        kept: Activations from the forward to the backward.
        deferred: Of a split backward, what is held from its first half to its second.
        forward_work: Working set of a forward.
        head_work: Working set of a backward while it is in the head, on top of ``kept``; 0 elsewhere.
        layer_work: The most that the backward takes on top of ``kept`` while it is in the layers.
        last_work: The same at its end, in the embedding.
        weight_work: Working set of the second half of a split backward.
    """

    kept: float
    deferred: float = 0.0
    forward_work: float = 0.0
    head_work: float = 0.0
    layer_work: float = 0.0
    last_work: float = 0.0
    weight_work: float = 0.0


def stage_steps(scenario: Scenario, layers: Sequence[int]) -> list[tuple[Step, ...]]:
    """The operations of some layers."""
    sizes = Sizes(scenario.model, scenario.training, scenario.layout)
    kinds = [scenario.model.has_experts(layer) for layer in layers]
    known = {kind: layer_steps(sizes, kind, scenario.framework.memory) for kind in set(kinds)}
    return [known[kind] for kind in kinds]


def chunk_bytes(scenario: Scenario, stage: int, layers: Sequence[int], mode: str) -> ChunkBytes:
    """What one rank of a virtual stage holds.

    Args:
        scenario: What is asked.
        stage: Virtual stage.
        layers: Numbers of its layers.
        mode: What it recomputes.
    """
    layout, training, model, habits = scenario.layout, scenario.training, scenario.model, scenario.framework.memory
    sizes = Sizes(model, training, layout)
    fresh = float(sizes.element) if habits.fresh_gradients and not by_unit(scenario) else 0.0
    given_up = frozenset(layout.recompute_ops) if mode == "selective" else frozenset[str]()
    again = layout.recomputed_layers(len(layers)) if mode != "none" else (False,) * len(layers)
    kept, works, splits, weights = [], [], [], []
    for number, steps in enumerate(stage_steps(scenario, layers)):
        parts = given_up if again[number] else frozenset[str]()
        whole = kept_bytes(steps)
        most = backward_bytes(steps, sizes.hidden, fresh, parts)
        if mode == "full" and again[number]:
            cut = habits.partition_checkpoints and not layout.sequence_parallel
            kept.append(sizes.hidden / (layout.tp if cut else 1))
            works.append(whole - sizes.hidden + most)
        else:
            kept.append(kept_bytes(steps, parts))
            works.append(most)
        splits.append(deferred_bytes(steps))
        weights.append(fresh * max(m.elements * m.count for step in steps for m in step.matrices))
    layer_work = max((work - sum(kept[at + 1 :]) for at, work in enumerate(works)), default=0.0)
    start, head_kept, head_work = _ends(scenario, stage, sizes)
    held = sum(kept) + start
    words = float(sizes.vocab * model.hidden)
    ends = float(sizes.element) * words if stage == 0 else 0.0
    if by_unit(scenario):  # the gradient of a unit as it is made, and as it is sent
        each = sizes.element + scenario.framework.reduce.bytes[training.precision]
        layer_work += each * max(unit_elements(steps) for steps in stage_steps(scenario, layers))
        if embedding_with_head(scenario):  # the head's part stays until the embedding adds its own
            layer_work += sizes.element * words
            ends = (each + sizes.element) * words
        else:
            ends = each * words * ((stage == 0) + (stage == layout.virtual_stages - 1))
    return ChunkBytes(
        kept=held + head_kept,
        deferred=sum(splits) + head_kept,
        forward_work=(0.0 if layout.flash_attention else 2.0 * sizes.scores * sizes.element)
        + 3.0 * sizes.hidden
        + max(sizes.routed_rows * model.hidden * sizes.element * 2 if model.has_experts(n) else 0.0 for n in layers),
        head_work=head_work,
        layer_work=layer_work - head_kept,
        last_work=ends - held - head_kept,
        weight_work=max(weights, default=0.0),
    )


def _ends(scenario: Scenario, stage: int, sizes: Sizes) -> tuple[float, float, float]:
    """Beside the layers: what the start of a stage keeps, what the head keeps, and the head's working set."""
    layout, training, model, habits = scenario.layout, scenario.training, scenario.model, scenario.framework.memory
    start = 0.0
    if stage > 0 and in_pieces(scenario):
        start += sizes.gathered / layout.tp  # the message as it came, beside the gathered one
    if stage == 0:
        start += sizes.own_tokens * model.hidden * MASK_BYTES if training.hidden_dropout > 0 else 0.0
        start += sizes.hidden if model.embedding_norm else 0.0
    if stage < layout.virtual_stages - 1:
        return start, 0.0, 0.0
    kept_logit, work_logit = (sizes.element, 0) if habits.fused_loss else (LOSS_BYTES, LOSS_BYTES + sizes.element)
    heads = 1 + model.mtp_layers
    kept = heads * (2.0 * sizes.hidden + kept_logit * sizes.logits)  # final norm's input and output, and the loss
    words = float(sizes.vocab * model.hidden * sizes.element)
    gather = sizes.gathered if layout.sequence_parallel and layout.tp > 1 and not habits.gather_buffer else 0.0
    return start, kept, float(sizes.logits * work_logit) + words + sizes.gathered + gather


@dataclass(frozen=True)
class Peak:
    """The highest level of activations on a rank, what of it is held for a backward, and the action it comes in.

    ``absent`` are gradients that the states count and that are not made yet.
    """

    level: float
    held: float
    index: int
    absent: float = 0.0


def peak_of(codes: Sequence[int], micro_batches: int, chunks: Sequence[ChunkBytes], absent: float = 0.0) -> Peak:
    """The highest level of activations on a rank; of several equal ones the first.

    Args:
        codes: Its actions in order.
        micro_batches: Micro-batches of a step.
        chunks: What its virtual stages hold, by chunk.
        absent: Gradients that are there from the end of the first backward only.
    """
    code = np.asarray(codes)
    kind, chunk = code % KINDS, code // KINDS // micro_batches

    def of(name: str) -> Floats:
        each: Floats = np.array([getattr(sizes, name) for sizes in chunks])
        return each.take(chunk)

    kept, deferred = of("kept"), of("deferred")
    changes = {FORWARD: kept, BACKWARD: -kept, INPUT_GRAD: deferred - kept, WEIGHT_GRAD: -deferred}
    change = np.select([kind == each for each in changes], list(changes.values()))
    after = np.cumsum(change)
    before = after - change
    backward = (kind == BACKWARD) | (kind == INPUT_GRAD)
    phases = (
        (kind == FORWARD, after, of("forward_work"), absent),
        (backward, before, of("head_work"), absent),
        (backward, before, of("layer_work"), absent),
        (backward, before, of("last_work"), 0.0),
        (kind == WEIGHT_GRAD, before, of("weight_work"), 0.0),
    )
    best = Peak(-np.inf, 0.0, 0)
    for when, held, work, missing in phases:
        level = np.where(when, held + work - missing, -np.inf)
        index = int(np.argmax(level))
        if level[index] > best.level:
            stays = float(min(held[index], held[index] + work[index]))
            best = Peak(float(level[index]), stays, index, missing)
    return best


Known = dict[tuple[object, ...], ChunkBytes]


def _known_chunk(scenario: Scenario, stage: int, layers: range, mode: str, known: Known) -> ChunkBytes:
    """`chunk_bytes`, worked out once for stages that are alike."""
    kinds = tuple(map(scenario.model.has_experts, layers)) if scenario.model.is_moe else (len(layers),)
    key = (stage == 0, stage == scenario.layout.virtual_stages - 1, mode, kinds)
    if key not in known:
        known[key] = chunk_bytes(scenario, stage, layers, mode)
    return known[key]


def rank_memory(
    scenario: Scenario,
    rank: int,
    codes: Sequence[int],
    parameters: Sequence[RankParameters],
    known: Known | None = None,
) -> tuple[StateSizes, Peak]:
    """States and activations of one pipeline rank.

    Args:
        scenario: What is asked.
        rank: Pipeline rank.
        codes: Its actions in order.
        parameters: Of each virtual stage.
        known: What was worked out for other ranks of the same scenario; filled further.
    """
    known = {} if known is None else known
    plan = layers_of_rank(scenario, rank)
    modes = scenario.layout.recompute_by_stage()
    chunks = [_known_chunk(scenario, stage, layers, modes[_mode(stage, rank, modes)], known) for stage, layers in plan]
    total = held_parameters(scenario, rank, parameters)
    last = scenario.layout.virtual_stages - 1
    stages = [stage for stage, _ in plan]
    steps = stage_steps(scenario, [layer for _, layers in plan for layer in layers])
    states = state_sizes(scenario, total, steps, head=last in stages, first=0 in stages)
    once = scenario.framework.memory.gradients_freed and len(codes) == 2  # one forward, one backward
    return states, peak_of(codes, scenario.micro_batches, chunks, states.gradients if once else 0.0)


def _mode(stage: int, rank: int, modes: Sequence[str]) -> int:
    return stage if len(modes) > stage else rank


def layers_of_rank(scenario: Scenario, rank: int) -> list[tuple[int, range]]:
    """The virtual stages of a pipeline rank, by chunk, each with the numbers of its layers."""
    layout, layers = scenario.layout, scenario.model.layers
    counts = layout.layers_by_virtual_stage(layers)
    ends = np.cumsum(counts)
    plan = []
    for chunk in range(layout.vpp):
        stage = rank if layout.vpp == 1 else load_schedule(layout.schedule).stage_of(rank, chunk, layout.pp)
        plan.append((stage, range(int(ends[stage]) - counts[stage], int(ends[stage]))))
    return plan


def memory_of(
    scenario: Scenario, calibration: Calibration, cost: JobCost, program: Program, timeline: Timeline
) -> Memory:
    """The memory of every pipeline rank and the verdict.

    A layout fits where the peak, the allocator's usual reserve above it and what lies
    outside the allocator stay within the device; it is marginal where only the peak
    and what lies outside do.
    """
    parameters = [each.parameters for each in cost.stages]
    capacity, context = scenario.machine.device.memory_bytes, calibration.memory.context.value
    freed = scenario.framework.memory.gradients_freed
    stages = []
    needs = []
    known: Known = {}
    for rank, codes in enumerate(program.table):
        states, peak = rank_memory(scenario, rank, codes, parameters, known)
        starts = timeline.start[rank]
        during = _named(codes[peak.index], scenario.micro_batches)
        at = starts[peak.index] if starts else 0.0
        if states.optimizer_work > states.units + peak.level:
            peak = Peak(states.optimizer_work - states.units, 0.0, 0)
            during, at = "optimizer", timeline.free[rank]
        working = states.units + peak.level
        top = states.total + working
        held = held_parameters(scenario, rank, parameters).total
        needs.append(top + reserve_bytes(calibration, working + peak.absent, held))
        reserved = max(top, min(needs[-1], capacity - context))
        stages.append(
            StageMemory(
                stage=rank,
                peak_bytes=top,
                reserved_bytes=reserved,
                device_bytes=reserved + context,
                peak_s=at,
                peak_during=during,
                parts=MemoryParts(
                    parameters=states.parameters,
                    gradients=states.gradients - peak.absent,
                    optimizer=states.optimizer,
                    activations=peak.held,
                    buffers=states.buffers + working + peak.absent - peak.held,
                ),
                between_steps_bytes=states.total - (states.gradients if freed else 0.0),
            )
        )
    worst = max(range(len(stages)), key=lambda rank: stages[rank].peak_bytes)
    verdict: Verdict = "does not fit"
    if max(needs) + context <= capacity:
        verdict = "fits"
    elif stages[worst].peak_bytes + context <= capacity:
        verdict = "marginal"
    return Memory(verdict, capacity, context, needs[worst] - stages[worst].peak_bytes, tuple(stages))


def reserve_bytes(calibration: Calibration, working: float, parameters: int) -> float:
    """What the allocator usually holds above a peak.

    Args:
        calibration: Its figures.
        working: Activations and working sets at that peak: what comes and goes leaves gaps.
        parameters: All that the rank holds before ZeRO shards it.
    """
    figures = calibration.memory
    gaps = figures.reserve_share.value * working if figures.reserve_share else 0.0
    buffers = figures.reserve_parameter.value * parameters if figures.reserve_parameter else 0.0
    return figures.reserve.value + gaps + buffers


def held_parameters(scenario: Scenario, rank: int, parameters: Sequence[RankParameters]) -> RankParameters:
    """All that a pipeline rank holds before ZeRO shards it.

    Args:
        scenario: What is asked.
        rank: Pipeline rank.
        parameters: Of each virtual stage.
    """
    return sum((parameters[stage] for stage, _ in layers_of_rank(scenario, rank)), RankParameters(0))


def _named(code: int, micro_batches: int) -> str:
    """An action for people; of several chunks it names the chunk too."""
    chunk, micro_batch = divmod(code // KINDS, micro_batches)
    return f"{NAMES[code % KINDS]} of micro-batch {micro_batch}" + (f", chunk {chunk}" if chunk else "")
