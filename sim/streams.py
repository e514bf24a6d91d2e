"""Two streams of a device, computing and communicating, that wait for each other unit by unit.

A unit is what is gathered and given up together, a layer. The device's communication runs in
the order in which it was asked for, as on one communicator of NCCL or RCCL:

    gather 0 | gather 1 | reduce 0 | gather 2 | reduce 1 | ...
             | compute 0           | compute 1           | ...

A unit computes when the one before is done and its weights are there; its gradients are
reduced when it is done. While unit ``i`` computes, the weights of the next ``ahead`` units are
gathered, not more: so many have a place to go to. What groups of other links sum (the copies of
a hybrid shard) runs beside, in an order of its own.

Source of the order: Zhao et al. 2023, arXiv 2304.11277, section 3.3 (backward prefetching, rate
limiter); DeepSpeed, runtime/zero/partitioned_param_coordinator.py, fetches likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitWork:
    """One unit of a pass.

    Attributes:
        run_s: Its pass, its own collectives in it.
        gather_s: Gathering its weights before; 0 where they are there.
        reduce_s: Reducing its gradients after; 0 where that is left for later.
        copy_s: Summing what was reduced over the copies of the shards.
        slowed: Share of ``run_s`` that slows down beside communication: the device's own work.
    """

    run_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0
    copy_s: float = 0.0
    slowed: float = 1.0


@dataclass(frozen=True)
class StreamTimes:
    """How a pass went.

    Attributes:
        end_s: When the last of both streams is done.
        stretched_s: What computing took longer because communication ran beside it.
    """

    end_s: float
    stretched_s: float


def play_streams(units: Sequence[UnitWork], ahead: int, slowdown: float = 1.0) -> StreamTimes:
    """Play one pass.

    Args:
        units: In the order in which they run.
        ahead: Units that are gathered before they are due.
        slowdown: How many times longer computing takes beside communication.

    With unit times f and gathers g all alike, and ``ahead`` at least 1, only the first gather and
    what a gather takes longer than a unit is seen: ``g + n max(f, g) - max(g - f, 0)``.

    >>> play_streams([UnitWork(run_s=3.0, gather_s=1.0)] * 4, ahead=1).end_s
    13.0
    >>> play_streams([UnitWork(run_s=3.0, gather_s=1.0)] * 4, ahead=0).end_s
    16.0
    """
    done: list[float] = []  # when each unit had computed
    ready: list[float] = []  # when the weights of each were there
    busy: list[tuple[float, float]] = []  # when communication went on, all of it that can touch a unit still to come
    link = copies = clock = stretched = 0.0
    for index, unit in enumerate(units):
        while len(ready) < min(index + ahead + 1, len(units)):
            place = len(ready) - ahead - 1  # the unit whose weights made room for these
            gather_s = units[len(ready)].gather_s
            if gather_s > 0:
                start = max(link, done[place] if place >= 0 else 0.0)
                link = start + gather_s
                busy.append((start, link))
                ready.append(link)
            else:
                ready.append(0.0)
        start = max(clock, ready[index])
        busy = [interval for interval in busy if interval[1] > start]
        factor = 1.0 + (slowdown - 1.0) * unit.slowed
        clock = _finish(start, unit.run_s, factor, busy) if factor > 1.0 else start + unit.run_s
        stretched += clock - start - unit.run_s
        done.append(clock)
        if unit.reduce_s > 0:
            start = max(link, clock)
            link = start + unit.reduce_s
            busy.append((start, link))
        if unit.copy_s > 0:
            start = max(copies, link, clock)
            copies = start + unit.copy_s
            busy.append((start, copies))
    return StreamTimes(max(clock, link, copies), max(stretched, 0.0))


def _finish(start: float, work_s: float, factor: float, busy: Sequence[tuple[float, float]]) -> float:
    """When work is done that takes ``factor`` times as long while anything is busy."""
    clock, left = start, work_s
    for begin, end in sorted(busy):
        if end <= clock:
            continue
        alone = max(begin - clock, 0.0)
        if left <= alone:
            return clock + left
        clock, left = clock + alone, left - alone
        beside = (end - clock) / factor
        if left <= beside:
            return clock + left * factor
        clock, left = end, left - beside
    return clock + left
