"""A step as events: one SimPy process a stage and lane, one network that all of them share.

The ranks of a tensor group and the replicas of a lane behave alike, so a stage is
played once and counted many times; its transfers are coflows that load the links as
all of them together do. Where a transfer can never meet another on a full link, its
end is known when it starts and costs no event of its own.

``play`` starts the events at the first moment at which classes of traffic can meet
that never met before (the end of the pipeline, when gradients are reduced) from the
state that the recurrence reached; ``play_exact`` plays the whole step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator
from typing import Any

import simpy

from ..scenarios.schedules import BACKWARD, FORWARD, KINDS
from .network import Network, TrafficClasses
from .recurrence import NOT_YET, inboxes, play_pipeline, refuse_deadlock
from .timeline import Collective, Lane, Played, Program, Step, TailTimes, Timeline

Process = Generator[simpy.Event, Any, None]
_Slot = float | simpy.Event  # when an input arrives, or what fires once that is known


class _Environment(simpy.Environment):
    """An environment that counts its events."""

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)
        self.events = 0

    def step(self) -> None:
        self.events += 1
        super().step()


class _Meeting:
    """Processes that go on together once all have come, and the seconds of what they then do."""

    def __init__(self, env: simpy.Environment, parties: int) -> None:
        self.left = parties
        self.done = env.event()
        self.seconds = 0.0


class _Run:
    """One step under way: its stages, their messages, its tail."""

    def __init__(self, env: _Environment, step: Step, classes: TrafficClasses, timelines: tuple[Timeline, ...]) -> None:
        self.env = env
        self.plan = step
        self.classes = classes
        self.network = Network(env, classes)
        self.timelines = timelines
        stages, lanes = step.stages, len(step.lanes)
        self.inbox: list[list[list[_Slot]]] = [[list(box) for box in inboxes(lane.program)] for lane in step.lanes]
        self.copies = [_Meeting(env, 2) for _ in range(lanes)]
        self.reduced = [_Meeting(env, lanes) for _ in range(stages)]
        self.gathered = [_Meeting(env, lanes) for _ in range(stages)]
        self.norm = _Meeting(env, lanes * stages)
        self.ended = 0.0

    def stage(self, number: int, stage: int, first: int, free_at: float) -> Process:
        """A stage of a lane from one of its actions to the end of the step."""
        env, lane, timeline = self.env, self.plan.lanes[number], self.timelines[number]
        program = lane.program
        note = timeline.start[stage].append
        inbox = self.inbox[number][stage]
        queue: list[simpy.Event | None] = [None, None]  # the message before, up and down, while sends do not block
        gone = [0.0, 0.0]  # when it has left
        if free_at > env.now:
            yield env.timeout(free_at - env.now)
        for code in program.table[stage][first:]:
            kind = code % KINDS
            arrival: Any = inbox[code]
            if arrival == NOT_YET:
                waiting = inbox[code] = env.event()
                arrival = yield waiting
            begin = max(env.now, arrival)
            yield env.timeout(begin - env.now + program.duration(stage, code))
            note(begin)
            receiver = program.receiver(stage, kind)
            if receiver is None:
                continue
            to = self.inbox[number][receiver]
            latency, solo_s = program.latency_s[min(stage, receiver)], program.sends(stage, kind)
            flows = lane.flows(stage, kind)
            if any(self.classes.weights[flow] for flow in flows):
                message_bytes = solo_s * min(self.classes.solo[flow] for flow in flows)
                sizes = [message_bytes] * len(flows)
                if program.send_blocks:
                    before = env.now
                    yield self._start(flows, sizes)
                    timeline.held_s[stage] += env.now - before
                    _deliver(to, code, env.now + latency)
                else:
                    sent = env.process(self._send(queue[kind], flows, sizes))
                    sent.callbacks.append(_delivery(env, to, code, latency))
                    queue[kind] = sent
            else:
                gone[kind] = max(env.now, gone[kind]) + solo_s
                _deliver(to, code, gone[kind] + latency)
                if program.send_blocks and solo_s > 0:
                    timeline.held_s[stage] += solo_s
                    yield env.timeout(solo_s)
        timeline.free[stage] = env.now
        yield from self._tail(number, stage)

    def _send(self, before: simpy.Event | None, flows: tuple[int, ...], sizes: list[float]) -> Process:
        """A message that leaves once the one before it has left."""
        if before is not None and not before.processed:
            yield before
        yield self._start(flows, sizes)

    def _start(self, flows: tuple[int, ...], sizes: list[float]) -> simpy.Event:
        """Begin coflows together; the event fires when the last has ended."""
        events = [self.network.start(flow, size) for flow, size in zip(flows, sizes, strict=True)]
        return events[0] if len(events) == 1 else self.env.all_of(events)

    def _tail(self, number: int, stage: int) -> Process:
        env, tail = self.env, self.plan.tail
        if tail.embedding[number] and stage in (0, self.plan.stages - 1):
            yield from self._meet(self.copies[number], tail.embedding[number])
        yield from self._meet(self.reduced[stage], tail.reduce[stage])
        yield from self._meet(self.norm, ())
        yield env.timeout(tail.barrier_s + tail.optimizer_s[stage])
        yield from self._meet(self.gathered[stage], tail.gather[stage])
        self.ended = max(self.ended, env.now)

    def _meet(self, meeting: _Meeting, collective: Collective) -> Process:
        meeting.left -= 1
        if meeting.left == 0:
            began = self.env.now
            for exchange in collective:
                flows = tuple(flow for flow in exchange.flows if not math.isinf(self.classes.solo[flow]))
                if flows and exchange.edge_bytes > 0:
                    yield self.env.timeout(exchange.latency_s)
                    yield self._start(flows, [exchange.edge_bytes] * len(flows))
            meeting.seconds = self.env.now - began
            meeting.done.succeed()
        yield meeting.done

    def result(self) -> Played:
        """The step once its events have run out."""
        last = self.plan.stages - 1
        embedding = tuple(
            tuple(meeting.seconds if stage in (0, last) and last > 0 else 0.0 for stage in range(last + 1))
            for meeting in self.copies
        )
        times = TailTimes(
            embedding,
            tuple(meeting.seconds for meeting in self.reduced),
            tuple(meeting.seconds for meeting in self.gathered),
            self.ended + self.plan.tail.overhead_s,
        )
        return Played(self.timelines, times, self.env.events, self.network.solves)


def _deliver(inbox: list[_Slot], code: int, at: float) -> None:
    """Put a message's arrival into an inbox, and tell the stage that waits for it."""
    slot = inbox[code]
    if isinstance(slot, simpy.Event):
        slot.succeed(at)
    inbox[code] = at


def _delivery(env: simpy.Environment, inbox: list[_Slot], code: int, latency: float) -> Any:
    return lambda _: _deliver(inbox, code, env.now + latency)


def play_exact(step: Step, classes: TrafficClasses) -> Played:
    """A whole step, every action and message an event."""
    stages = step.stages
    timelines = tuple(Timeline([[] for _ in range(stages)], [0.0] * stages, [0.0] * stages) for _ in step.lanes)
    env = _Environment()
    run = _Run(env, step, classes, timelines)
    for number in range(len(step.lanes)):
        for stage in range(stages):
            env.process(run.stage(number, stage, 0, 0.0))
    env.run()
    for lane, timeline in zip(step.lanes, timelines, strict=True):
        refuse_deadlock(lane.program, timeline.start)
    return run.result()


def play(step: Step, classes: TrafficClasses) -> Played:
    """A whole step, the recurrence up to the cut and events from there.

    The cut is the start of the last backward of the last stage of the lane that gets
    there first: no gradient can be reduced before it. What differs from `play_exact` is
    the sharing between messages of the pipeline before the cut, which the recurrence sees
    at their solo rates. Where messages queue up behind each other the whole step is played.
    """
    if any(lane.program.queues for lane in step.lanes):
        return play_exact(step, classes)
    warm = [play_pipeline(lane.program) for lane in step.lanes]
    cut = min(timeline.start[-1][-1] for timeline in warm)
    env = _Environment(cut)
    firsts = [[bisect_left(starts, cut) for starts in timeline.start] for timeline in warm]
    timelines = tuple(
        _before(lane, timeline, first) for lane, timeline, first in zip(step.lanes, warm, firsts, strict=True)
    )
    run = _Run(env, step, classes, timelines)
    for number, (lane, timeline, first) in enumerate(zip(step.lanes, warm, firsts, strict=True)):
        _deliver_sent(run.inbox[number], lane.program, timeline, first)
        for stage, count in enumerate(first):
            env.process(run.stage(number, stage, count, _free_at(lane.program, timeline, stage, count)))
    env.run()
    return run.result()


def _before(lane: Lane, warm: Timeline, first: list[int]) -> Timeline:
    """The part of a timeline that lies before the cut."""
    program = lane.program
    held = list(warm.held_s)
    for stage, count in enumerate(first):
        held[stage] -= sum(program.holds(stage, code % KINDS) for code in program.table[stage][count:])
    starts = [warm.start[stage][:count] for stage, count in enumerate(first)]
    return Timeline(starts, [0.0] * program.stages, held)


def _free_at(program: Program, warm: Timeline, stage: int, count: int) -> float:
    """When a stage is done with its first ``count`` actions."""
    if count == 0:
        return 0.0
    code = program.table[stage][count - 1]
    return warm.start[stage][count - 1] + program.duration(stage, code) + program.holds(stage, code % KINDS)


def _deliver_sent(inbox: list[list[_Slot]], program: Program, warm: Timeline, first: list[int]) -> None:
    """Put what was sent before the cut, and is used after it, into the inboxes.

    Args:
        inbox: Of every stage of a lane, by code.
        program: What the lane plays.
        warm: What the recurrence found.
        first: Of each stage the first action after the cut.
    """
    for stage, count in enumerate(first):
        for kind in (FORWARD, BACKWARD):
            to = program.receiver(stage, kind)
            if to is None:
                continue
            wanted = {code for code in program.table[to][first[to] :] if code % KINDS == kind}
            wanted -= set(program.table[stage][count:])
            index = count
            while wanted and index > 0:
                index -= 1
                code = program.table[stage][index]
                if code in wanted:
                    end = warm.start[stage][index] + program.duration(stage, code)
                    inbox[to][code] = end + program.travels(stage, kind)
                    wanted.discard(code)
