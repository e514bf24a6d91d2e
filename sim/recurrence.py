"""A step as a max-plus recurrence: exact wherever transfers never share a link.

``end(action) = max(end of the rank's previous action, arrival of its input) + duration``,
walked over the schedule table with a work-list. It plays the same table as the
events do and returns the same timeline, without a clock.

Source: the recurrence is that of a timed event graph, Baccelli et al. 1992,
Synchronization and Linearity, chapter 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..scenarios.schedules import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD
from ..topology.errors import input_error
from .fast_1f1b import play_1f1b
from .network import TrafficClasses
from .tail import Gate, Tail, TailTimes, alone_s, gates_of, gathered_s
from .timeline import Lane, Played, Program, Step, Timeline

NOT_YET = -1.0
Gates = Sequence[dict[int, Gate]]  # of each rank, by chunk


def inboxes(program: Program) -> list[list[float]]:
    """When inputs arrive, by code, at the start of a step: what needs no message is there at once.

    One more entry at the end of each is there from the start: for what needs no input.
    """
    size = program.chunks * program.width
    boxes = [[NOT_YET] * size + [0.0] for _ in range(program.ranks)]
    for stage, kind in ((0, FORWARD), (program.stages - 1, BACKWARD)):
        rank, chunk = program.homes[stage]
        first = chunk * program.width
        boxes[rank][first + kind : first + program.width : KINDS] = [0.0] * program.micro_batches
    return boxes


def inputs_of(program: Program, rank: int) -> Sequence[int]:
    """Of each action in a rank's table, the entry of its inbox that it waits for."""
    codes = program.table[rank]
    if not program.splits:
        return codes
    needs = np.asarray(codes)
    kind = needs % KINDS
    needs = np.where(kind == INPUT_GRAD, needs - INPUT_GRAD + BACKWARD, needs)
    entries: list[int] = np.where(kind == WEIGHT_GRAD, program.chunks * program.width, needs).tolist()
    return entries


def play_pipeline(program: Program, gates: Gates = ()) -> Timeline:
    """When every action of a step starts, each message at its solo rate.

    Args:
        program: What is played.
        gates: What the first forward of each rank's chunks waits for, beside its input.

    Raises:
        InputError: If the schedule waits for something that no rank will ever send.
    """
    late: dict[tuple[int, int], float] = {}
    if program.schedule == "1f1b" and program.chunks == 1 and not program.splits and not program.queues:
        starts, free = play_1f1b(program, [row[0] for row in gates], late)
    else:
        starts, free = walk(program, gates, late)
    return Timeline(starts, free, [program.held(rank) for rank in range(program.ranks)], late)


def walk(
    program: Program, gates: Gates = (), late: dict[tuple[int, int], float] | None = None
) -> tuple[list[list[float]], list[float]]:
    """Starts of all actions, and when each rank is free, for any table.

    Args:
        program: What is played.
        gates: What the first forward of each rank's chunks waits for, beside its input.
        late: Where to note how much longer those took, by rank and code.

    Raises:
        InputError: If the schedule waits for something that no rank will ever send.
    """
    ranks, width = program.ranks, program.width
    arrival = inboxes(program)
    starts: list[list[float]] = [[] for _ in range(ranks)]
    clock = [0.0] * ranks
    position = [0] * ranks
    table = program.table
    needed = [inputs_of(program, rank) for rank in range(ranks)]
    targets = [
        sorted({slot.to for slot in slots if slot.to not in (None, rank)}) for rank, slots in enumerate(program.slots)
    ]
    # When the last message to each rank has left; the next one waits for it.
    left = [[0.0] * ranks for _ in range(ranks)]
    gated = [
        {program.first_forward(rank, chunk): gate for chunk, gate in row.items()} for rank, row in enumerate(gates)
    ] or [{} for _ in range(ranks)]
    varied = program.jitter is not None or bool(program.extra_s)
    blocks = program.send_blocks
    waiting = list(range(ranks - 1, -1, -1))
    while waiting:
        rank = waiting.pop()
        codes, needs, inbox, gone = table[rank], needed[rank], arrival[rank], left[rank]
        slots, note, doors = program.slots[rank], starts[rank].append, gated[rank]
        count = len(codes)
        at = began = position[rank]
        now = clock[rank]
        while at < count:
            ready = inbox[needs[at]]
            if ready < 0.0:
                break
            code = codes[at]
            now = max(now, ready)
            seconds, to, shift, sends_s, latency_s = slots[code // width * KINDS + code % KINDS]
            if varied:
                seconds = program.duration(rank, code)
            note(now)
            end = now + seconds
            if code in doors:
                end = doors[code].passed(now, seconds)
                if late is not None:
                    late[rank, code] = max(end - now - seconds, 0.0)
            now = end
            at += 1
            if to is None:
                continue
            if to == rank:
                inbox[code + shift] = now
                continue
            leaves = (now if now > gone[to] else gone[to]) + sends_s
            gone[to] = leaves
            arrival[to][code + shift] = leaves + latency_s
            if blocks:
                now = leaves
        if at > began:
            position[rank], clock[rank] = at, now
            waiting.extend(reversed(targets[rank]))
    refuse_deadlock(program, starts)
    return starts, clock


def refuse_deadlock(program: Program, starts: list[list[float]]) -> None:
    """Raise for a step that came to rest before its last action.

    Raises:
        InputError: Naming the first rank that waits, and what it never came to.
    """
    for rank, (codes, done) in enumerate(zip(program.table, starts, strict=True)):
        if len(done) < len(codes):
            action = program.named(rank, codes[len(done)])
            raise input_error(f"deadlocks: rank {rank} waits for ever before {action}", field="layout.schedule")


def close_step(lanes: Sequence[Lane], timelines: Sequence[Timeline], tail: Tail, classes: TrafficClasses) -> TailTimes:
    """The tail of a step with every transfer at its solo rate.

    Args:
        lanes: What was played.
        timelines: When.
        tail: What follows.
        classes: Solo rates.
    """
    ranks = len(timelines[0].free)
    clock = [list(timeline.free) for timeline in timelines]
    embedding = [[0.0] * ranks for _ in timelines]
    for lane, collective in enumerate(tail.embedding):
        if collective:
            seconds = alone_s(collective, classes)
            end = max(clock[lane][rank] for rank in tail.copies) + seconds
            for rank in tail.copies:
                embedding[lane][rank] = seconds
                clock[lane][rank] = end
    reduce, waits, reduced = [], [], []
    for rank, collective in enumerate(tail.reduce):
        pieces = tail.pieces_of(rank)
        arrived = max(lane[rank] for lane in clock)
        now = busy = 0.0
        for piece in pieces[:-1]:
            made = (
                timeline.made_s(lane.program, rank, piece.chunk, piece.at)
                for lane, timeline in zip(lanes, timelines, strict=True)
            )
            seconds = alone_s(piece.of(collective), classes)
            now = max(now, *made) + seconds
            busy += seconds
        seconds = alone_s(pieces[-1].of(collective), classes)
        reduced.append(max(now, arrived) + seconds)
        reduce.append(busy + seconds)
        waits.append(seconds if len(pieces) == 1 else reduced[-1] - arrived)
    gather = [alone_s(collective, classes) for collective in tail.gather]
    if not tail.gathers_late:
        gather = [times[-1] if times else 0.0 for times in gathered_s(tail, classes)]
    after = gather if tail.gathers_late else [0.0] * ranks
    barrier = max(end + tail.sum_s(rank) for rank, end in enumerate(reduced)) + tail.barrier_s
    ends = [barrier + tail.optimizer_s[rank] + after[rank] for rank in range(ranks)]
    return TailTimes(
        tuple(tuple(lane) for lane in embedding),
        tuple(reduce),
        tuple(gather),
        max(ends) + tail.overhead_s,
        tuple(waits),
    )


def play(step: Step, classes: TrafficClasses) -> Played:
    """A whole step by recurrence."""
    gates = gates_of(step.tail, gathered_s(step.tail, classes))
    timelines = tuple(play_pipeline(lane.program, gates) for lane in step.lanes)
    return Played(timelines, close_step(step.lanes, timelines, step.tail, classes))
