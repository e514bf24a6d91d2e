"""A step as events: one SimPy process a pipeline rank and lane, one network that all of them share.

The ranks of a tensor group and the replicas of a lane behave alike, so a pipeline rank is
played once and counted many times; its transfers are coflows that load the links as
all of them together do. Where a transfer can never meet another on a full link, its
end is known when it starts and costs no event of its own.

``play`` starts the events at the first moment at which classes of traffic can meet
that never met before (the end of the pipeline, when gradients are reduced) from the
state that the recurrence reached; ``play_exact`` plays the whole step. Weights that are
gathered beside the first forward are events in both: in ``play`` among themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import Any

import simpy

from .network import TrafficClasses
from .recurrence import NOT_YET, inboxes, inputs_of, play_pipeline, refuse_deadlock
from .tail import Collective, Tail, TailTimes, gates_of
from .timeline import Lane, Played, Program, Step, Timeline
from .transfers import Environment, Gathering, Meeting, Process, Transfers, gathered_together

_Slot = float | simpy.Event  # when an input arrives, or what fires once that is known


class _Run:
    """One step under way: its ranks, their messages, its tail.

    Args:
        env: The simulation.
        step: What is played.
        classes: Its traffic.
        timelines: Of each lane, what of it lies before the first event.
        gathered_s: When each piece of each rank's weights is there, where that was played before.
    """

    def __init__(
        self,
        env: Environment,
        step: Step,
        classes: TrafficClasses,
        timelines: tuple[Timeline, ...],
        gathered_s: list[list[float]] | None = None,
    ) -> None:
        self.env = env
        self.plan = step
        self.classes = classes
        self.transfers = Transfers(env, classes)
        self.timelines = timelines
        ranks, lanes, tail = step.ranks, len(step.lanes), step.tail
        self.inbox: list[list[list[_Slot]]] = [[list(box) for box in inboxes(lane.program)] for lane in step.lanes]
        self.copies = [Meeting(env, 2) for _ in range(lanes)]
        self.made = [[Meeting(env, lanes) for _ in tail.pieces_of(rank)] for rank in range(ranks)]
        self.reduced = [Meeting(env, lanes) for _ in range(ranks)]
        self.gathered = [Meeting(env, lanes) for _ in range(ranks)]
        self.norm = Meeting(env, lanes * ranks)
        self.gates = gates_of(tail, gathered_s) if gathered_s is not None else []
        self.gathering = Gathering(env, self.transfers, tail) if gathered_s is None else None
        self.gathered_s = gathered_s
        self.ended = 0.0
        for rank, pieces in enumerate(self.made):
            if len(pieces) > 1:
                env.process(self._reduce(rank))

    def rank(self, number: int, rank: int, first: int, free_at: float) -> Process:
        """A pipeline rank of a lane from one of its actions to the end of the step."""
        env, lane, timeline = self.env, self.plan.lanes[number], self.timelines[number]
        program, boxes = lane.program, self.inbox[number]
        note = timeline.start[rank].append
        inbox = boxes[rank]
        pieces = self._pieces_after(program, rank)
        gated = self._gated(program, rank)
        queue: dict[int, simpy.Event] = {}  # the message before, by receiver, while sends do not block
        gone: dict[int, float] = {}  # when it has left
        if free_at > env.now:
            yield env.timeout(free_at - env.now)
        needs = inputs_of(program, rank)
        for index in range(first, len(needs)):
            code, need = program.table[rank][index], needs[index]
            arrival: Any = inbox[need]
            if arrival == NOT_YET:
                waiting = inbox[need] = env.event()
                arrival = yield waiting
            begin, seconds = max(env.now, arrival), program.duration(rank, code)
            if code in gated:
                if begin > env.now:
                    yield env.timeout(begin - env.now)
                yield from self._gated_pass(number, rank, code, seconds)
            else:
                if index in pieces:
                    self._mark(rank, pieces[index], begin - env.now, seconds)
                yield env.timeout(begin - env.now + seconds)
            note(begin)
            _, to, shift, solo_s, latency = program.slot(rank, code)
            if to is None:
                continue
            box, target = boxes[to], code + shift
            if to == rank:
                _deliver(box, target, env.now)
                continue
            flows = lane.flows(rank, to)
            if any(self.classes.weights[flow] for flow in flows):
                message_bytes = solo_s * min(self.classes.solo[flow] for flow in flows)
                sizes = [message_bytes] * len(flows)
                if program.send_blocks:
                    before = env.now
                    yield self.transfers.start(flows, sizes)
                    timeline.held_s[rank] += env.now - before
                    _deliver(box, target, env.now + latency)
                else:
                    sent = env.process(self._send(queue.get(to), flows, sizes))
                    sent.callbacks.append(_delivery(env, box, target, latency))
                    queue[to] = sent
            else:
                gone[to] = max(env.now, gone.get(to, 0.0)) + solo_s
                _deliver(box, target, gone[to] + latency)
                if program.send_blocks and solo_s > 0:
                    timeline.held_s[rank] += solo_s
                    yield env.timeout(solo_s)
        timeline.free[rank] = env.now
        yield from self._tail(number, rank)

    def _pieces_after(self, program: Program, rank: int) -> dict[int, list[tuple[int, float]]]:
        """The pieces of a rank's gradients but the last, by the place of the action that makes them."""
        found: dict[int, list[tuple[int, float]]] = {}
        for number, piece in enumerate(self.plan.tail.pieces_of(rank)[:-1]):
            found.setdefault(program.finals[rank][piece.chunk], []).append((number, piece.at))
        return found

    def _mark(self, rank: int, pieces: list[tuple[int, float]], wait_s: float, pass_s: float) -> None:
        """Let each piece be reduced as soon as its gradients are made."""
        for piece, at in pieces:
            timer = self.env.timeout(wait_s + at * pass_s)
            timer.callbacks.append(partial(self._come, self.made[rank][piece]))

    def _come(self, meeting: Meeting, _: simpy.Event | None = None) -> None:
        if meeting.come(self.env.now):
            meeting.done.succeed()

    def _gated(self, program: Program, rank: int) -> dict[int, int]:
        """First forwards that wait for weights, and their chunks."""
        pieces = self.plan.tail.gather_pieces
        if not pieces:
            return {}
        return {program.first_forward(rank, chunk): chunk for chunk in {piece.chunk for piece in pieces[rank]}}

    def _gated_pass(self, number: int, rank: int, code: int, seconds: float) -> Process:
        """A first forward, each of its layers once its weights are there."""
        env, timeline = self.env, self.timelines[number]
        chunk = code // self.plan.lanes[number].program.width
        began = env.now
        if self.gathering is None:
            yield env.timeout(self.gates[rank][chunk].passed(began, seconds) - began)
        else:
            there = self.gathering.there[rank]
            pieces = self.plan.tail.gather_pieces[rank]
            mine = [(event, piece.at) for event, piece in zip(there, pieces, strict=True) if piece.chunk == chunk]
            for (event, at), following in zip(mine, [*(at for _, at in mine[1:]), 1.0], strict=True):
                if not event.processed:
                    yield event
                slower = 1.0 if there[-1].triggered else self.plan.tail.slowdown
                yield env.timeout((following - at) * seconds * slower)
        timeline.late_s[rank, code] = max(env.now - began - seconds, 0.0)

    def _send(self, before: simpy.Event | None, flows: tuple[int, ...], sizes: list[float]) -> Process:
        """A message that leaves once the one before it has left."""
        if before is not None and not before.processed:
            yield before
        yield self.transfers.start(flows, sizes)

    def _reduce(self, rank: int) -> Process:
        """The gradients of a rank, piece by piece, each once all lanes have made it."""
        collective, meeting = self.plan.tail.reduce[rank], self.reduced[rank]
        for piece, made in zip(self.plan.tail.pieces_of(rank), self.made[rank], strict=True):
            yield made.done
            began = self.env.now
            yield from self.transfers.run(piece.of(collective))
            meeting.seconds += self.env.now - began
        meeting.came = self.env.now
        meeting.done.succeed()

    def _tail(self, number: int, rank: int) -> Process:
        env, tail = self.env, self.plan.tail
        if tail.embedding[number] and rank in tail.copies:
            yield from self._meet(self.copies[number], tail.embedding[number])
        if len(self.made[rank]) > 1:
            self._come(self.made[rank][-1])
            yield self.reduced[rank].done
        else:
            yield from self._meet(self.reduced[rank], tail.reduce[rank])
        if tail.sum_s(rank) > 0:
            yield env.timeout(tail.sum_s(rank))
        yield from self._meet(self.norm, ())
        yield env.timeout(tail.barrier_s + tail.optimizer_s[rank])
        if tail.gathers_late:
            yield from self._meet(self.gathered[rank], tail.gather[rank])
        self.ended = max(self.ended, env.now)

    def _meet(self, meeting: Meeting, collective: Collective) -> Process:
        if meeting.come(self.env.now):
            began = self.env.now
            yield from self.transfers.run(collective)
            meeting.seconds = self.env.now - began
            meeting.done.succeed()
        yield meeting.done

    def result(self) -> Played:
        """The step once its events have run out."""
        tail = self.plan.tail
        embedding = tuple(
            tuple(meeting.seconds if collective and rank in tail.copies else 0.0 for rank in range(self.plan.ranks))
            for meeting, collective in zip(self.copies, tail.embedding, strict=True)
        )
        gathered = self.gathering.there_s if self.gathering is not None else self.gathered_s
        assert gathered is not None
        times = TailTimes(
            embedding,
            tuple(meeting.seconds for meeting in self.reduced),
            tuple(meeting.seconds for meeting in self.gathered)
            if tail.gathers_late
            else tuple(row[-1] if row else 0.0 for row in gathered),
            self.ended + tail.overhead_s,
            tuple(
                meeting.seconds if len(made) == 1 else meeting.came - made[-1].came
                for meeting, made in zip(self.reduced, self.made, strict=True)
            ),
        )
        return Played(self.timelines, times, self.env.events, self.transfers.network.solves)


def _deliver(inbox: list[_Slot], code: int, at: float) -> None:
    """Put a message's arrival into an inbox, and tell the rank that waits for it."""
    slot = inbox[code]
    if isinstance(slot, simpy.Event):
        slot.succeed(at)
    inbox[code] = at


def _delivery(env: simpy.Environment, inbox: list[_Slot], code: int, latency: float) -> Any:
    return lambda _: _deliver(inbox, code, env.now + latency)


def play_exact(step: Step, classes: TrafficClasses) -> Played:
    """A whole step, every action and message an event."""
    ranks = step.ranks
    timelines = tuple(Timeline([[] for _ in range(ranks)], [0.0] * ranks, [0.0] * ranks) for _ in step.lanes)
    env = Environment()
    run = _Run(env, step, classes, timelines)
    for number in range(len(step.lanes)):
        for rank in range(ranks):
            env.process(run.rank(number, rank, 0, 0.0))
    env.run()
    for lane, timeline in zip(step.lanes, timelines, strict=True):
        refuse_deadlock(lane.program, timeline.start)
    return run.result()


def play(step: Step, classes: TrafficClasses) -> Played:
    """A whole step, the recurrence up to the cut and events from there.

    The cut is the first moment at which a rank may begin to reduce its gradients: the start
    of the last action of the rank that gets there first, or of the action that makes its first
    piece. What differs from `play_exact` is the sharing between messages of the pipeline before
    the cut, which the recurrence sees at their solo rates, and their sharing with weights that
    are gathered beside them. Where messages queue up behind each other the whole step is played.
    """
    if any(lane.program.queues for lane in step.lanes):
        return play_exact(step, classes)
    gathered_s, events, solves = gathered_together(step.tail, classes)
    gates = gates_of(step.tail, gathered_s)
    warm = [play_pipeline(lane.program, gates) for lane in step.lanes]
    cut = min(_cut(step.tail, lane, timeline) for lane, timeline in zip(step.lanes, warm, strict=True))
    env = Environment(cut)
    env.events = events
    firsts = [[bisect_left(starts, cut) for starts in timeline.start] for timeline in warm]
    timelines = tuple(
        _before(lane, timeline, first) for lane, timeline, first in zip(step.lanes, warm, firsts, strict=True)
    )
    run = _Run(env, step, classes, timelines, gathered_s)
    run.transfers.network.solves = solves
    for number, (lane, timeline, first) in enumerate(zip(step.lanes, warm, firsts, strict=True)):
        _deliver_sent(run.inbox[number], lane.program, timeline, first)
        for rank, count in enumerate(first):
            env.process(run.rank(number, rank, count, _free_at(lane.program, timeline, rank, count)))
    env.run()
    return run.result()


def _cut(tail: Tail, lane: Lane, warm: Timeline) -> float:
    """When the first rank of a lane begins the action after which gradients may be reduced."""
    cut = min(starts[-1] for starts in warm.start)
    for rank, starts in enumerate(warm.start):
        pieces = tail.pieces_of(rank)[:-1]
        cut = min([cut, *(starts[lane.program.finals[rank][piece.chunk]] for piece in pieces)])
    return cut


def _before(lane: Lane, warm: Timeline, first: list[int]) -> Timeline:
    """The part of a timeline that lies before the cut."""
    program = lane.program
    held = list(warm.held_s)
    if program.send_blocks:
        for rank, count in enumerate(first):
            held[rank] -= sum(program.slot(rank, code).sends_s for code in program.table[rank][count:])
    starts = [warm.start[rank][:count] for rank, count in enumerate(first)]
    return Timeline(starts, [0.0] * program.ranks, held, dict(warm.late_s))


def _free_at(program: Program, warm: Timeline, rank: int, count: int) -> float:
    """When a rank is done with its first ``count`` actions."""
    if count == 0:
        return 0.0
    held = program.slot(rank, program.table[rank][count - 1]).sends_s if program.send_blocks else 0.0
    return warm.end(program, rank, count - 1) + held


def _deliver_sent(inbox: list[list[_Slot]], program: Program, warm: Timeline, first: list[int]) -> None:
    """Put what was sent before the cut, and is used after it, into the inboxes.

    Args:
        inbox: Of every rank of a lane, by code.
        program: What the lane plays.
        warm: What the recurrence found.
        first: Of each rank the first action after the cut.
    """
    wanted: list[set[tuple[int, int]]] = [set() for _ in first]  # of each sender: receiver and the code there
    for rank, count in enumerate(first):
        for code in program.table[rank][count:]:
            need = program.needs(code)
            sender = None if need is None else program.sender(rank, need)
            if need is not None and sender is not None:
                wanted[sender].add((rank, need))
    for rank, count in enumerate(first):
        codes, missing = program.table[rank], wanted[rank]
        for code in codes[count:]:
            slot = program.slot(rank, code)
            if slot.to is not None:
                missing.discard((slot.to, code + slot.shift))
        index = count
        while missing and index > 0:
            index -= 1
            code = codes[index]
            slot = program.slot(rank, code)
            if slot.to is None:
                continue
            target = slot.to, code + slot.shift
            if target in missing:
                inbox[slot.to][code + slot.shift] = warm.end(program, rank, index) + slot.sends_s + slot.latency_s
                missing.discard(target)
