"""What the players of a schedule are given, and what they return.

Replicas that behave alike are one *lane*, played once and counted many times; a slow
device or a broken link puts the replicas it touches into lanes of their own. A pipeline
rank holds one or more *chunks*, each of them a virtual stage of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..scenarios.schedules import BACKWARD, FORWARD, INPUT_GRAD, KINDS, LETTERS, WEIGHT_GRAD
from .tail import Tail, TailTimes

Floats = npt.NDArray[np.float64]
Hop = tuple[int, int]  # from one pipeline rank to another


class Slot(NamedTuple):
    """One kind of action of one chunk, and the message after it.

    Attributes:
        seconds: The action alone.
        to: Rank that the message goes to; the own rank where the next virtual stage lives there; None for none.
        shift: What the receiver's code for it is more than the sender's.
        sends_s: The message at its solo rate, latency aside.
        latency_s: Its latency.
    """

    seconds: float
    to: int | None
    shift: int
    sends_s: float
    latency_s: float


@dataclass(frozen=True)
class Program:
    """A schedule with the seconds of its actions: all that the timing of one lane depends on.

    A code is ``KINDS * (chunk * micro_batches + micro_batch) + kind``. Messages go from a virtual
    stage to the next and back; boundary v lies between the virtual stages v and v + 1.

    Attributes:
        table: Actions of each pipeline rank in order, as codes.
        forward_s: Forward of one micro-batch, by rank and chunk.
        backward_s: Backward of one micro-batch, likewise.
        up_s: Message from a virtual stage to the next at its solo rate, latency aside, a boundary.
        down_s: Message back, a boundary.
        latency_s: Latency of a message, a boundary.
        send_blocks: Whether a rank waits until its message has left before it goes on.
        micro_batches: Micro-batches of a step.
        schedule: The table's name, where it has one: some have a quicker way to the same times.
        jitter: Factors on the actions' seconds, shape (ranks, chunks x micro-batches, 2 for forward and backward);
            None for 1.
        input_s: The part of a backward that the virtual stage before waits for, where the table parts them.
        weight_s: The rest of it, which makes the gradients of the weights.
        stage_of: Virtual stage of each rank's chunks; left out: chunk x ranks + rank.
        extra_s: Seconds that single actions take longer, by rank and code.
    """

    table: Sequence[Sequence[int]]
    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    up_s: tuple[float, ...]
    down_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    send_blocks: bool
    micro_batches: int
    schedule: str = ""
    jitter: Floats | None = None
    input_s: tuple[tuple[float, ...], ...] = ()
    weight_s: tuple[tuple[float, ...], ...] = ()
    stage_of: tuple[tuple[int, ...], ...] = ()
    extra_s: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.table)

    @property
    def chunks(self) -> int:
        """Virtual stages of a rank."""
        return len(self.forward_s[0])

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return self.ranks * self.chunks

    @property
    def splits(self) -> bool:
        """Whether the table may part a backward."""
        return bool(self.input_s)

    @property
    def width(self) -> int:
        """Codes of one chunk."""
        return KINDS * self.micro_batches

    @cached_property
    def placed(self) -> tuple[tuple[int, ...], ...]:
        """Virtual stage of each rank's chunks."""
        if self.stage_of:
            return self.stage_of
        return tuple(tuple(chunk * self.ranks + rank for chunk in range(self.chunks)) for rank in range(self.ranks))

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """Rank and chunk of each virtual stage."""
        homes = {stage: (rank, chunk) for rank, row in enumerate(self.placed) for chunk, stage in enumerate(row)}
        return tuple(homes[stage] for stage in range(self.stages))

    @cached_property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """Of each rank its kinds of action, chunk by chunk: entry ``KINDS * chunk + kind``."""
        return tuple(
            tuple(self._slot(rank, chunk, kind) for chunk in range(self.chunks) for kind in range(KINDS))
            for rank in range(self.ranks)
        )

    def _slot(self, rank: int, chunk: int, kind: int) -> Slot:
        by_kind = (self.forward_s, self.backward_s, self.input_s or self.backward_s, self.weight_s)
        seconds = by_kind[kind][rank][chunk] if by_kind[kind] else 0.0
        stage = self.placed[rank][chunk]
        following = stage + 1 if kind == FORWARD else stage - 1
        if kind == WEIGHT_GRAD or not 0 <= following < self.stages:
            return Slot(seconds, None, 0, 0.0, 0.0)
        to, there = self.homes[following]
        # A gradient is looked for under the whole backward's code, whichever way its reader parts the backward.
        shift = (there - chunk) * self.width + (BACKWARD - kind if kind == INPUT_GRAD else 0)
        if to == rank:
            return Slot(seconds, to, shift, 0.0, 0.0)
        boundary = min(stage, following)
        sends_s = (self.up_s if kind == FORWARD else self.down_s)[boundary]
        return Slot(seconds, to, shift, sends_s, self.latency_s[boundary])

    def slot(self, rank: int, code: int) -> Slot:
        """The kind of action that a code is one of."""
        return self.slots[rank][code // self.width * KINDS + code % KINDS]

    def duration(self, rank: int, code: int) -> float:
        """Seconds of one action."""
        unit, kind = divmod(code, KINDS)
        seconds = self.slots[rank][unit // self.micro_batches * KINDS + kind].seconds
        if self.jitter is not None:
            seconds *= float(self.jitter[rank, unit, int(kind != FORWARD)])
        if self.extra_s:
            seconds += self.extra_s.get((rank, code), 0.0)
        return seconds

    def passes(self, rank: int, kind: int, chunk: int = 0) -> Floats:
        """Seconds of the actions of one kind and chunk, by micro-batch."""
        slot, count = chunk * KINDS + kind, self.micro_batches
        seconds = np.full(count, self.slots[rank][slot].seconds)
        if self.jitter is not None:
            seconds *= self.jitter[rank, chunk * count : (chunk + 1) * count, int(kind != FORWARD)]
        first = chunk * self.width
        for (where, code), extra_s in self.extra_s.items():
            if where == rank and code % KINDS == kind and first <= code < first + self.width:
                seconds[(code - first) // KINDS] += extra_s
        return seconds

    def worked(self, rank: int) -> float:
        """Seconds that a rank computes in a step; the halves of a parted backward sum to the whole."""
        both = (FORWARD, BACKWARD)
        return sum(float(self.passes(rank, kind, chunk).sum()) for chunk in range(self.chunks) for kind in both)

    def extra(self, rank: int) -> float:
        """Seconds that single actions of a rank take longer."""
        return sum(seconds for (where, _), seconds in self.extra_s.items() if where == rank)

    def sends(self, rank: int, kind: int, chunk: int = 0) -> float:
        """Seconds that the message after an action takes at its solo rate; 0 where none is sent."""
        return self.slots[rank][chunk * KINDS + kind].sends_s

    def holds(self, rank: int, kind: int, chunk: int = 0) -> float:
        """Seconds that it keeps its rank from going on."""
        return self.sends(rank, kind, chunk) if self.send_blocks else 0.0

    def travels(self, rank: int, kind: int, chunk: int = 0) -> float:
        """Seconds from an action's end to the arrival of its message, at the solo rate."""
        slot = self.slots[rank][chunk * KINDS + kind]
        return slot.sends_s + slot.latency_s

    def held(self, rank: int) -> float:
        """Seconds that a whole step's messages hold a rank, at their solo rates."""
        both = (self.holds(rank, kind, chunk) for chunk in range(self.chunks) for kind in (FORWARD, BACKWARD))
        return self.micro_batches * sum(both)

    @cached_property
    def queues(self) -> bool:
        """Whether a message may have to wait for the one before it: some take longer than the action that follows."""
        if self.send_blocks:
            return False
        kinds = (FORWARD, BACKWARD, INPUT_GRAD) if self.splits else (FORWARD, BACKWARD)
        for rank, slots in enumerate(self.slots):
            quickest: dict[int, float] = {}
            longest: dict[int, float] = {}
            for chunk in range(self.chunks):
                for kind in kinds:
                    slot = slots[chunk * KINDS + kind]
                    if slot.to is None or slot.to == rank:
                        continue
                    least = float(self.passes(rank, kind, chunk).min())
                    quickest[slot.to] = min(quickest.get(slot.to, least), least)
                    longest[slot.to] = max(longest.get(slot.to, 0.0), slot.sends_s)
            if any(longest[to] > quickest[to] for to in longest):
                return True
        return False

    def needs(self, code: int) -> int | None:
        """The code under which an action's input arrives; None where it needs none."""
        kind = code % KINDS
        if kind == WEIGHT_GRAD:
            return None
        return code - INPUT_GRAD + BACKWARD if kind == INPUT_GRAD else code

    def sender(self, rank: int, need: int) -> int | None:
        """The rank that an input comes from; None where it is there from the start."""
        stage = self.placed[rank][need // self.width]
        before = stage - 1 if need % KINDS == FORWARD else stage + 1
        return self.homes[before][0] if 0 <= before < self.stages else None

    def first_forward(self, rank: int, chunk: int) -> int:
        """The first forward of a chunk, as its code."""
        return next(code for code in self.table[rank] if code // self.width == chunk and code % KINDS == FORWARD)

    @cached_property
    def finals(self) -> tuple[tuple[int, ...], ...]:
        """Place in each rank's table of the action that ends the gradients of each of its chunks."""
        finals = []
        for codes in self.table:
            found: dict[int, int] = {}
            index = len(codes)
            while index > 0 and len(found) < self.chunks:
                index -= 1
                if codes[index] % KINDS in (BACKWARD, WEIGHT_GRAD):
                    found.setdefault(codes[index] // self.width, index)
            finals.append(tuple(found.get(chunk, len(codes) - 1) for chunk in range(self.chunks)))
        return tuple(finals)

    def named(self, rank: int, code: int) -> str:
        """An action as people write it: virtual stage, kind, micro-batch.

        >>> Program([[0, 1]], ((1.0,),), ((2.0,),), (), (), (), True, 1).named(0, 1)
        '0B0'
        """
        unit, kind = divmod(code, KINDS)
        chunk, micro_batch = divmod(unit, self.micro_batches)
        return f"{self.placed[rank][chunk]}{LETTERS[kind]}{micro_batch}"


@dataclass(frozen=True)
class Lane:
    """Replicas that behave alike.

    Attributes:
        replicas: Their numbers.
        program: What each of them plays.
        up: Classes of the messages from a rank to the next, a boundary; several where ranks are not folded.
        down: Classes of the messages back, a boundary.
        around: Classes of messages between ranks that are not neighbours, as from the last to the first.
    """

    replicas: tuple[int, ...]
    program: Program
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]
    around: Mapping[Hop, tuple[int, ...]] = field(default_factory=dict)

    def flows(self, source: int, target: int) -> tuple[int, ...]:
        """Classes of the messages from one rank to another."""
        return flows_of(self.up, self.down, self.around, source, target)


def flows_of(
    up: Sequence[tuple[int, ...]],
    down: Sequence[tuple[int, ...]],
    around: Mapping[Hop, tuple[int, ...]],
    source: int,
    target: int,
) -> tuple[int, ...]:
    """Classes of the messages from one pipeline rank to another."""
    if target == source + 1:
        return up[source]
    if target == source - 1:
        return down[target]
    return around[source, target]


@dataclass
class Timeline:
    """When each action of each rank of one lane started.

    Attributes:
        start: Seconds from the start of the step, a list a rank, in the order of its actions.
        free: When a rank was done with its last action and message.
        held_s: Seconds a rank stood waiting for its own messages to leave.
        late_s: Seconds that actions took longer than their program says, waiting for weights, by rank and code.
    """

    start: list[list[float]]
    free: list[float]
    held_s: list[float]
    late_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def end(self, program: Program, rank: int, index: int) -> float:
        """When an action ended."""
        code = program.table[rank][index]
        end = self.start[rank][index] + program.duration(rank, code)
        return end + self.late_s.get((rank, code), 0.0) if self.late_s else end

    def late(self, rank: int) -> float:
        """Seconds in which a rank's passes waited for weights."""
        return sum(late_s for (where, _), late_s in self.late_s.items() if where == rank)

    def made_s(self, program: Program, rank: int, chunk: int, at: float) -> float:
        """When a share of the gradients of a chunk is made, the rest of its last backward still to come."""
        index = program.finals[rank][chunk]
        seconds = program.duration(rank, program.table[rank][index])
        if self.start[rank]:
            return self.start[rank][index] + at * seconds
        return self.free[rank] - (1.0 - at) * seconds  # a closed form knows ends alone


@dataclass(frozen=True)
class Step:
    """All that is played: the lanes, and what joins them at the end."""

    lanes: tuple[Lane, ...]
    tail: Tail

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return self.lanes[0].program.ranks

    @property
    def ops(self) -> int:
        """Actions of all lanes."""
        return sum(len(codes) for lane in self.lanes for codes in lane.program.table)


@dataclass(frozen=True)
class Played:
    """A whole step: the timeline of each lane, its tail, and what playing it cost."""

    timelines: tuple[Timeline, ...]
    tail: TailTimes
    events: int = 0
    solves: int = 0
