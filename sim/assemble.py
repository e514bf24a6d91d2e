"""The step of a scenario, put together from its costs and its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..scenarios.scenario import Scenario
from ..scenarios.schedules import KINDS, code_table
from ..topology.errors import input_error
from . import shards
from .calibration import Calibration
from .costs import JobCost, PassCost, StageCost
from .network import TrafficClasses
from .perturb import jitter_of
from .pieces import Parts, gradient_pieces, weight_pieces
from .tail import Piece, Tail, alone_s, slowed_s
from .timeline import Lane, Program, Step
from .traffic import LaneTraffic, Traffic
from .virtual_stages import StageTable, boundaries, ends_of

MOST_ACTIONS = 20_000_000  # of one step over all ranks and lanes: about 10 s by recurrence and 1 GB of times


def build_step(scenario: Scenario, calibration: Calibration, cost: JobCost, traffic: Traffic) -> Step:
    """Every lane's program, and what follows it.

    Raises:
        InputError: If a step has more actions than can be held.
    """
    layout, lanes = scenario.layout, len(traffic.lanes)
    schedule = scenario.schedule
    splits = schedule.splits_backward
    actions = (3 if splits else 2) * layout.pp * layout.vpp * scenario.micro_batches * lanes
    if actions > MOST_ACTIONS:
        raise input_error(
            f"{scenario.micro_batches} micro-batches on {layout.pp * layout.vpp} stages and {lanes} kinds of replicas"
            f" are {actions} actions; at most {MOST_ACTIONS} can be played; lower training.global_batch or raise"
            f" layout.micro_batch",
            field="training.global_batch",
        )
    table = code_table(schedule, layout.pp, scenario.micro_batches, layout.vpp)
    played = tuple(_lane(scenario, cost, traffic, lane, table, splits=splits) for lane in traffic.lanes)
    tail = _tail(scenario, calibration, cost, traffic, played[0].program)
    if tail.slowdown > 1.0 and tail.reduce_pieces:
        played = tuple(_slowed(lane, tail, traffic.classes) for lane in played)
    return Step(played, tail)


def _lane(
    scenario: Scenario,
    cost: JobCost,
    traffic: Traffic,
    lane: LaneTraffic,
    table: Sequence[Sequence[int]],
    *,
    splits: bool,
) -> Lane:
    solo = traffic.classes.solo
    layout, placed = scenario.layout, traffic.placed
    stages = cost.of_lane(lane)

    def each(seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(seconds[stage] for stage in row) for row in placed)

    def message_s(source: int, target: int) -> float:
        if source == target:
            return 0.0
        return cost.message_bytes / min(solo[flow] for flow in lane.flows(source, target))

    hops = boundaries(placed)
    forward, backward = ([one.total_s for one in passes] for passes in zip(*map(_passes, stages), strict=True))
    # A backward that waits for its host is handed over evenly: each half has about as many kernels.
    weight = [
        stage.backward.total_s / 2 if stage.backward.host_wait_s > 0 else stage.weight.total_s for stage in stages
    ]
    pipeline = scenario.framework.pipeline
    program = Program(
        table=table,
        forward_s=each(forward),
        backward_s=each(backward),
        up_s=tuple(message_s(source, target) for source, target in hops),
        down_s=tuple(message_s(target, source) for source, target in hops),
        latency_s=tuple(traffic.latency_s(source, target) for source, target in hops),
        send_blocks=pipeline.send_blocks and not (pipeline.chunks_overlap and layout.vpp > 1),
        micro_batches=scenario.micro_batches,
        schedule=layout.schedule,
        jitter=jitter_of(scenario.perturb, lane.replicas[0], layout.pp, layout.vpp * scenario.micro_batches),
        input_s=each([whole - part for whole, part in zip(backward, weight, strict=True)]) if splits else (),
        weight_s=each(weight) if splits else (),
        stage_of=placed,
    )
    return Lane(lane.replicas, program, lane.up, lane.down, lane.around)


def _passes(stage: StageCost) -> tuple[PassCost, PassCost]:
    return stage.forward, stage.backward


def _tail(scenario: Scenario, calibration: Calibration, cost: JobCost, traffic: Traffic, program: Program) -> Tail:
    figures, step, layout = calibration.network, calibration.step, scenario.layout
    ranks = layout.tp * layout.pp
    slowest = [min(lane.speed[rank] for lane in traffic.lanes) for rank in range(layout.pp)]
    parts = _parts(scenario, cost, traffic.placed)
    reduces, gathers = any(traffic.reduce), any(traffic.gather)
    return Tail(
        embedding=tuple(lane.embedding for lane in traffic.lanes),
        reduce=traffic.reduce,
        gather=traffic.gather,
        # One number over the model-parallel ranks: a ring would take 2 (n - 1) steps, a tree 2 log2 n.
        barrier_s=figures.base.value + 2 * (ranks - 1).bit_length() * figures.fabric_hop.value if ranks > 1 else 0.0,
        optimizer_s=tuple(
            sum(cost.stages[stage].optimizer_s for stage in row) / speed
            for row, speed in zip(traffic.placed, slowest, strict=True)
        ),
        overhead_s=step.overhead.value + (layout.pp - 1) * step.hop_overhead.value,
        embedding_ranks=ends_of(traffic.placed),
        reduce_pieces=_gradients(parts, program) if layout.overlap_grad_reduce and reduces else (),
        gather_pieces=tuple(map(weight_pieces, parts)) if layout.overlap_param_gather and gathers else (),
        slowdown=_slowdown(calibration),
        sums_s=_slowest_s([cost.sums_of_lane(lane) for lane in traffic.lanes]),
    )


def _slowest_s(lanes: Sequence[Sequence[PassCost]]) -> tuple[float, ...]:
    """Of each rank the seconds of the lane that takes longest."""
    return tuple(max(one.total_s for one in costs) for costs in zip(*lanes, strict=True))


def _slowdown(calibration: Calibration) -> float:
    """How much longer computing takes beside communication."""
    figure = calibration.compute.overlap_slowdown
    return 1.0 if figure is None else figure.value


def _parts(scenario: Scenario, cost: JobCost, placed: StageTable) -> list[list[Parts]]:
    """What each chunk of each rank holds."""
    layout, model = scenario.layout, scenario.model
    layers = layout.layers_by_virtual_stage(model.layers)
    last = len(cost.stages) - 1
    embedding = model.rank_embedding_parameters(layout.tp, scenario.training.seq_len)
    head = shards.head_parameters(scenario)
    own_head = not model.tied or scenario.embedding_copied
    return [
        [
            Parts(
                layers=layers[stage],
                parameters=cost.stages[stage].parameters.total,
                embedding=embedding if stage == 0 else 0,
                head=head if stage == last else 0,
                own_head=own_head,
            )
            for stage in row
        ]
        for row in placed
    ]


def _gradients(parts: Sequence[Sequence[Parts]], program: Program) -> tuple[tuple[Piece, ...], ...]:
    """Of each rank the pieces of its gradients, in the order in which they are made."""
    return tuple(
        gradient_pieces(chunks, sorted(range(len(chunks)), key=lambda chunk: program.finals[rank][chunk]))
        for rank, chunks in enumerate(parts)
    )


def _slowed(lane: Lane, tail: Tail, classes: TrafficClasses) -> Lane:
    """The lane with its last backwards as slow as the gradients make them that are reduced beside them.

    What a chunk's gradients still take after its last backward is not held against the passes that follow.
    """
    program = lane.program
    extra: dict[tuple[int, int], float] = {}
    for rank, collective in enumerate(tail.reduce):
        pieces = tail.pieces_of(rank)
        if len(pieces) == 1:
            continue
        for chunk, index in enumerate(program.finals[rank]):
            mine = [(piece.at, alone_s(piece.of(collective), classes)) for piece in pieces if piece.chunk == chunk]
            code = program.table[rank][index]
            alone = program.slots[rank][chunk * KINDS + code % KINDS].seconds
            extra[rank, code] = slowed_s(alone, mine, tail.slowdown) - alone
    return replace(lane, program=replace(program, extra_s=extra))
