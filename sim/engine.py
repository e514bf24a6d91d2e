"""A step as events: one SimPy process a stage, one network that all of them share.

The ranks of a tensor group and the replicas of a stage behave alike, so a stage is
played once and counted many times; its transfers are coflows that load the links as
all of them together do. Where a transfer can never meet another on a full link, its
end is known when it starts and costs no event of its own.

``play`` starts the events at the first moment at which classes of traffic can meet
that never met before (the end of the pipeline, when gradients are reduced) from the
state that the recurrence reached; ``play_exact`` plays the whole step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from typing import Any

import simpy

from ..scenarios.schedules import BACKWARD, FORWARD, KINDS
from .network import Network
from .recurrence import NOT_YET, inboxes, play_pipeline
from .timeline import Played, Program, Tail, TailTimes, Timeline
from .traffic import Traffic

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


class _Step:
    """One step under way: its stages, their messages, its tail."""

    def __init__(self, env: _Environment, program: Program, tail: Tail, traffic: Traffic, timeline: Timeline) -> None:
        self.env = env
        self.program = program
        self.tail = tail
        self.traffic = traffic
        self.network = Network(env, traffic.classes)
        self.timeline = timeline
        stages = program.stages
        self.inbox: list[list[_Slot]] = [list(box) for box in inboxes(program)]
        self.embedding_s = [0.0] * stages
        self.reduce_s = [0.0] * stages
        self.gather_s = [0.0] * stages
        self.ended = [0.0] * stages
        self._pair_arrived: list[simpy.Event] = []
        self._pair_done = env.event()
        self._norms = 0
        self._all_reduced = env.event()

    def stage(self, stage: int, first: int, free_at: float) -> Process:
        """A stage from one of its actions to the end of the step."""
        env, program, timeline = self.env, self.program, self.timeline
        note = timeline.start[stage].append
        inbox = self.inbox[stage]
        if free_at > env.now:
            yield env.timeout(free_at - env.now)
        for code in program.table[stage][first:]:
            kind = code % KINDS
            arrival: Any = inbox[code]
            if arrival == NOT_YET:
                waiting = inbox[code] = env.event()
                arrival = yield waiting
            begin = max(env.now, arrival)
            yield env.timeout(begin - env.now + program.passes(stage, kind))
            note(begin)
            receiver = program.receiver(stage, kind)
            if receiver is None:
                continue
            to = self.inbox[receiver]
            flow = self.traffic.forward(stage) if kind == FORWARD else self.traffic.backward(stage)
            latency, solo_s = program.latency_s[min(stage, receiver)], program.sends(stage, kind)
            if self.traffic.classes.weights[flow]:
                sent = self.network.start(flow, solo_s * self.traffic.classes.solo[flow])
                sent.callbacks.append(_delivery(env, to, code, latency))
                if program.send_blocks:
                    before = env.now
                    yield sent
                    timeline.held_s[stage] += env.now - before
            else:
                _deliver(to, code, env.now + solo_s + latency)
                if program.send_blocks and solo_s > 0:
                    timeline.held_s[stage] += solo_s
                    yield env.timeout(solo_s)
        timeline.free[stage] = env.now
        yield from self._tail(stage)

    def _tail(self, stage: int) -> Process:
        env, tail, traffic = self.env, self.tail, self.traffic
        if tail.embedding_bytes > 0 and stage in (0, self.program.stages - 1):
            yield from self._reduce_embedding(stage)
        ring = traffic.data(stage)
        self.reduce_s[stage] = yield from self._ring(ring, tail.reduce_bytes[stage], tail.reduce_latency_s)
        self._norms += 1
        if self._norms == self.program.stages:
            self._all_reduced.succeed()
        yield self._all_reduced
        yield env.timeout(tail.barrier_s + tail.optimizer_s[stage])
        self.gather_s[stage] = yield from self._ring(ring, tail.gather_bytes[stage], tail.gather_latency_s)
        self.ended[stage] = env.now

    def _reduce_embedding(self, stage: int) -> Process:
        arrived = self.env.event()
        self._pair_arrived.append(arrived)
        if len(self._pair_arrived) < 2:
            yield arrived  # for the other copy's stage
        else:
            self._pair_arrived[0].succeed()
            self.env.process(self._run_embedding())
        begin = self.env.now
        yield self._pair_done
        self.embedding_s[stage] = self.env.now - begin

    def _run_embedding(self) -> Process:
        yield from self._ring(self.traffic.embedding, self.tail.embedding_bytes, self.tail.embedding_latency_s)
        self._pair_done.succeed()

    def _ring(self, kind: int, edge_bytes: float, latency_s: float) -> Generator[simpy.Event, Any, float]:
        if edge_bytes <= 0 or self.traffic.classes.solo[kind] == float("inf"):
            return 0.0
        begin = self.env.now
        yield self.env.timeout(latency_s)
        yield self.network.start(kind, edge_bytes)
        return self.env.now - begin

    def result(self) -> Played:
        """The step once its events have run out."""
        times = TailTimes(
            tuple(self.embedding_s),
            tuple(self.reduce_s),
            tuple(self.gather_s),
            max(self.ended) + self.tail.overhead_s,
        )
        return Played(self.timeline, times, self.env.events, self.network.solves)


def _deliver(inbox: list[_Slot], code: int, at: float) -> None:
    """Put a message's arrival into an inbox, and tell the stage that waits for it."""
    slot = inbox[code]
    if isinstance(slot, simpy.Event):
        slot.succeed(at)
    inbox[code] = at


def _delivery(env: simpy.Environment, inbox: list[_Slot], code: int, latency: float) -> Any:
    return lambda _: _deliver(inbox, code, env.now + latency)


def play_exact(program: Program, tail: Tail, traffic: Traffic) -> Played:
    """A whole step, every action and message an event."""
    stages = program.stages
    timeline = Timeline([[] for _ in range(stages)], [0.0] * stages, [0.0] * stages)
    env = _Environment()
    step = _Step(env, program, tail, traffic, timeline)
    for stage in range(stages):
        env.process(step.stage(stage, 0, 0.0))
    env.run()
    return step.result()


def play(program: Program, tail: Tail, traffic: Traffic) -> Played:
    """A whole step, the recurrence up to the cut and events from there.

    The cut is the start of the last backward of the last stage: no gradient can be
    reduced before it. What differs from `play_exact` is the sharing between messages
    of the pipeline before the cut, which the recurrence sees at their solo rates.
    """
    warm = play_pipeline(program)
    stages = program.stages
    cut = warm.start[-1][-1]
    first = [bisect_left(warm.start[stage], cut) for stage in range(stages)]
    free = [0.0] * stages
    held = list(warm.held_s)
    for stage, count in enumerate(first):
        held[stage] -= sum(program.holds(stage, code % KINDS) for code in program.table[stage][count:])
        if count:
            kind = program.table[stage][count - 1] % KINDS
            free[stage] = warm.start[stage][count - 1] + program.passes(stage, kind) + program.holds(stage, kind)
    starts = [warm.start[stage][:count] for stage, count in enumerate(first)]
    env = _Environment(cut)
    step = _Step(env, program, tail, traffic, Timeline(starts, [0.0] * stages, held))
    _deliver_sent(step.inbox, program, warm, first)
    for stage in range(stages):
        env.process(step.stage(stage, first[stage], free[stage]))
    env.run()
    return step.result()


def _deliver_sent(inbox: list[list[_Slot]], program: Program, warm: Timeline, first: list[int]) -> None:
    """Put what was sent before the cut, and is used after it, into the inboxes.

    Args:
        inbox: Of every stage, by code.
        program: The step.
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
                    end = warm.start[stage][index] + program.passes(stage, kind)
                    inbox[to][code] = end + program.travels(stage, kind)
                    wanted.discard(code)
