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
from .timeline import Played, Program, Tail, TailTimes, Timeline
from .traffic import Traffic

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
    if program.schedule == "1f1b":
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
            program.forward_s[stage],
            program.backward_s[stage],
            arrival[stage + 1] if stage < last else nowhere,
            arrival[stage - 1] if stage > 0 else nowhere,
            program.travels(stage, FORWARD),
            program.travels(stage, BACKWARD),
            program.holds(stage, FORWARD),
            program.holds(stage, BACKWARD),
        )
        for stage in range(stages)
    ]
    waiting = list(range(last, -1, -1))
    while waiting:
        stage = waiting.pop()
        codes, count, inbox, note, forward_s, backward_s, up, down, up_s, down_s, hold_up, hold_down = visits[stage]
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
                now += backward_s
                down[code] = now + down_s
                now += hold_down
            else:
                now += forward_s
                up[code] = now + up_s
                now += hold_up
            at += 1
        if at > began:
            position[stage], clock[stage] = at, now
            if stage < last:
                waiting.append(stage + 1)
            if stage > 0:
                waiting.append(stage - 1)
    stuck = [stage for stage in range(stages) if position[stage] < len(program.table[stage])]
    if stuck:
        action = action_of(program.table[stuck[0]][position[stuck[0]]], stuck[0])
        raise input_error(f"deadlocks: stage {stuck[0]} waits for ever before {action}", field="layout.schedule")
    return starts, clock


def close_step(free: list[float], tail: Tail, traffic: Traffic) -> TailTimes:
    """The tail of a step with every transfer at its solo rate.

    Args:
        free: When each stage was done with the pipeline.
        tail: What follows.
        traffic: Solo rates.
    """
    stages = len(free)
    solo = traffic.classes.solo
    clock = list(free)
    embedding = [0.0] * stages
    if tail.embedding_bytes > 0:
        begin = max(clock[0], clock[-1])
        end = begin + tail.embedding_latency_s + tail.embedding_bytes / solo[traffic.embedding]
        for stage in (0, stages - 1):
            embedding[stage] = end - begin
            clock[stage] = end
    reduce = [
        _ring(size, tail.reduce_latency_s, solo[traffic.data(stage)]) for stage, size in enumerate(tail.reduce_bytes)
    ]
    barrier = max(at + seconds for at, seconds in zip(clock, reduce, strict=True)) + tail.barrier_s
    gather = [
        _ring(size, tail.gather_latency_s, solo[traffic.data(stage)]) for stage, size in enumerate(tail.gather_bytes)
    ]
    ends = [barrier + tail.optimizer_s[stage] + gather[stage] for stage in range(stages)]
    return TailTimes(tuple(embedding), tuple(reduce), tuple(gather), max(ends) + tail.overhead_s)


def _ring(edge_bytes: float, latency_s: float, rate: float) -> float:
    if edge_bytes <= 0 or math.isinf(rate):
        return 0.0
    return latency_s + edge_bytes / rate


def play(program: Program, tail: Tail, traffic: Traffic) -> Played:
    """A whole step by recurrence."""
    timeline = play_pipeline(program)
    return Played(timeline, close_step(timeline.free, tail, traffic))
