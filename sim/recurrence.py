"""A step as a max-plus recurrence: exact wherever transfers never share a link.

``end(action) = max(end of the stage's previous action, arrival of its input) + duration``,
walked over the schedule table with a work-list. It plays the same table as the
events do and returns the same timeline, without a clock.

Source: the recurrence is that of a timed event graph, Baccelli et al. 1992,
Synchronization and Linearity, chapter 2.
"""

from __future__ import annotations

import math

from ..scenarios.schedules import BACKWARD, FORWARD, KINDS, action_of
from ..topology.errors import input_error
from .fast_1f1b import play_1f1b
from .network import TrafficClasses
from .timeline import Collective, Played, Program, Step, Tail, TailTimes, Timeline

NOT_YET = -1.0


def inboxes(program: Program) -> list[list[float]]:
    """When inputs arrive, by code, at the start of a step: what needs no message is there at once."""
    size = KINDS * program.micro_batches
    boxes = [[NOT_YET] * size for _ in range(program.stages)]
    boxes[0][FORWARD::KINDS] = [0.0] * program.micro_batches
    boxes[-1][BACKWARD::KINDS] = [0.0] * program.micro_batches
    return boxes


def play_pipeline(program: Program) -> Timeline:
    """When every action of a step starts, each message at its solo rate.

    Raises:
        InputError: If the schedule waits for something that no stage will ever send.
    """
    if program.schedule == "1f1b" and not program.queues:
        starts, free = play_1f1b(program)
    else:
        starts, free = walk(program)
    return Timeline(starts, free, [program.held(stage) for stage in range(program.stages)])


def walk(program: Program) -> tuple[list[list[float]], list[float]]:
    """Starts of all actions, and when each stage is free, for any table.

    Raises:
        InputError: If the schedule waits for something that no stage will ever send.
    """
    stages, last = program.stages, program.stages - 1
    arrival = inboxes(program)
    nowhere = [0.0] * len(arrival[0])
    starts: list[list[float]] = [[] for _ in range(stages)]
    clock = [0.0] * stages
    position = [0] * stages
    # All that a visit to a stage needs: in a full pipeline a visit gets two actions far, so it must start cheaply.
    visits = [
        (
            program.table[stage],
            len(program.table[stage]),
            arrival[stage],
            starts[stage].append,
            program.passes(stage, FORWARD).tolist(),
            program.passes(stage, BACKWARD).tolist(),
            arrival[stage + 1] if stage < last else nowhere,
            arrival[stage - 1] if stage > 0 else nowhere,
            program.sends(stage, FORWARD),
            program.sends(stage, BACKWARD),
            program.latency_s[stage] if stage < last else 0.0,
            program.latency_s[stage - 1] if stage > 0 else 0.0,
        )
        for stage in range(stages)
    ]
    # When the last message of each stage has left; the next one waits for it.
    left_up, left_down = [0.0] * stages, [0.0] * stages
    blocks = program.send_blocks
    waiting = list(range(last, -1, -1))
    while waiting:
        stage = waiting.pop()
        codes, count, inbox, note, forward_s, backward_s, up, down, up_s, down_s, up_late, down_late = visits[stage]
        gone_up, gone_down = left_up[stage], left_down[stage]
        at = began = position[stage]
        now = clock[stage]
        while at < count:
            code = codes[at]
            ready = inbox[code]
            if ready < 0.0:
                break
            now = max(now, ready)
            note(now)
            if code & 1:
                now += backward_s[code // KINDS]
                gone_down = max(now, gone_down) + down_s
                down[code] = gone_down + down_late
                if blocks:
                    now = gone_down
            else:
                now += forward_s[code // KINDS]
                gone_up = max(now, gone_up) + up_s
                up[code] = gone_up + up_late
                if blocks:
                    now = gone_up
            at += 1
        left_up[stage], left_down[stage] = gone_up, gone_down
        if at > began:
            position[stage], clock[stage] = at, now
            if stage < last:
                waiting.append(stage + 1)
            if stage > 0:
                waiting.append(stage - 1)
    refuse_deadlock(program, starts)
    return starts, clock


def refuse_deadlock(program: Program, starts: list[list[float]]) -> None:
    """Raise for a step that came to rest before its last action.

    Raises:
        InputError: Naming the first stage that waits, and what it never came to.
    """
    for stage, (codes, done) in enumerate(zip(program.table, starts, strict=True)):
        if len(done) < len(codes):
            action = action_of(codes[len(done)], stage)
            raise input_error(f"deadlocks: stage {stage} waits for ever before {action}", field="layout.schedule")


def close_step(free: list[list[float]], tail: Tail, classes: TrafficClasses) -> TailTimes:
    """The tail of a step with every transfer at its solo rate.

    Args:
        free: When each stage of each lane was done with the pipeline.
        tail: What follows.
        classes: Solo rates.
    """
    stages = len(free[0])
    clock = [list(lane) for lane in free]
    embedding = [[0.0] * stages for _ in free]
    for lane, collective in enumerate(tail.embedding):
        if collective:
            seconds = alone_s(collective, classes)
            end = max(clock[lane][0], clock[lane][-1]) + seconds
            for stage in (0, stages - 1):
                embedding[lane][stage] = seconds
                clock[lane][stage] = end
    reduce = [alone_s(collective, classes) for collective in tail.reduce]
    gather = [alone_s(collective, classes) for collective in tail.gather]
    reduced = [max(lane[stage] for lane in clock) + reduce[stage] for stage in range(stages)]
    barrier = max(reduced) + tail.barrier_s
    ends = [barrier + tail.optimizer_s[stage] + gather[stage] for stage in range(stages)]
    return TailTimes(
        tuple(tuple(lane) for lane in embedding), tuple(reduce), tuple(gather), max(ends) + tail.overhead_s
    )


def alone_s(collective: Collective, classes: TrafficClasses) -> float:
    """Seconds of a collective that shares no link: its phases in turn, each at the pace of its slowest flow."""
    total = 0.0
    for exchange in collective:
        rate = min((classes.solo[flow] for flow in exchange.flows), default=math.inf)
        if exchange.edge_bytes > 0 and not math.isinf(rate):
            total += exchange.latency_s + exchange.edge_bytes / rate
    return total


def play(step: Step, classes: TrafficClasses) -> Played:
    """A whole step by recurrence."""
    timelines = tuple(play_pipeline(lane.program) for lane in step.lanes)
    return Played(timelines, close_step([timeline.free for timeline in timelines], step.tail, classes))
