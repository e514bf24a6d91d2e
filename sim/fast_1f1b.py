"""The recurrence of 1F1B for all stages at once: the same times as the walk over its table, ten times sooner.

After its ``w = min(p - s - 1, m)`` first forwards, stage s alternates: forward ``w + i``,
backward ``i``. So round i of every stage needs only round i - 1 of itself and of the stage
before it, and, for the backward, round i of the stage after it, which is a running maximum
along the stages. `exatwin.sim.recurrence` tells what is being computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..scenarios.schedules import BACKWARD, FORWARD
from .tail import Gate
from .timeline import Program

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def play_1f1b(
    program: Program, gates: Sequence[Gate] = (), late: dict[tuple[int, int], float] | None = None
) -> tuple[list[list[float]], list[float]]:
    """When every action of a 1F1B step starts, a list a stage in the order of its actions, and when each stage is free.

    Args:
        program: A step whose table is that of 1F1B, one chunk a rank.
        gates: What the first forward of each stage waits for, beside its input.
        late: Where to note how much longer it took, by stage and code.
    """
    stages, count = program.ranks, program.micro_batches
    stage_range = np.arange(stages)
    warm_up = np.minimum(stages - 1 - stage_range, count)
    rounds = count - warm_up  # rounds in which a stage still has a forward
    forward = np.array([program.passes(s, FORWARD) for s in range(stages)])
    backward = np.array([program.passes(s, BACKWARD) for s in range(stages)])
    hold_up = np.array([program.holds(s, FORWARD) for s in range(stages)])
    hold_down = np.array([program.holds(s, BACKWARD) for s in range(stages)])
    up = np.array([program.travels(s, FORWARD) for s in range(stages)])
    down = np.array([program.travels(s, BACKWARD) for s in range(stages)])

    first = _fill(forward, hold_up, up, warm_up, gates)
    free = np.array(
        [row[-1] + forward[s, len(row) - 1] + hold_up[s] if len(row) else 0.0 for s, row in enumerate(first)]
    )
    # Arrival of the forward of each stage's round 0: the last warm-up forward of the stage before it.
    arrival = np.zeros(stages)
    for stage in range(1, stages):
        before, number = first[stage - 1], int(warm_up[stage])
        if number < len(before):
            arrival[stage] = before[number] + forward[stage - 1, number] + up[stage - 1]

    f_start = np.zeros((count, stages))
    b_start = np.zeros((count, stages))
    least = int(rounds.min())
    # Only the first forward and the last backward may take longer than the others, but for jitter.
    steady = program.jitter is None and not program.extra_s and not gates
    travel = _travel(backward[:, 0], down)
    for i in range(count):
        start = np.maximum(free, arrival)
        if i == 0 and gates:
            for stage in np.flatnonzero(warm_up == 0).tolist():
                forward[stage, 0] = gates[stage].passed(start[stage], forward[stage, 0]) - start[stage]
        f_start[i] = start
        if steady:
            passed, back = forward[:, 0], backward[:, 0]
        else:
            passed, back = forward[stage_range, np.minimum(warm_up + i, count - 1)], backward[:, i]
            travel = _travel(back, down)
        ready = start + passed + hold_up
        if i >= least:
            ready = np.where(i < rounds, ready, free)
        # b[s] = max(ready[s], b[s + 1] + back[s + 1] + down[s + 1]), from the last stage to the first
        begins = np.maximum.accumulate((ready - travel)[::-1])[::-1] + travel
        b_start[i] = begins
        free = begins + back + hold_down
        arrival[1:] = (start + passed + up)[:-1]
    if late is not None and gates:
        longer = [float(forward[s, 0]) - program.duration(s, FORWARD) for s in range(stages)]
        late |= {(s, FORWARD): max(seconds, 0.0) for s, seconds in enumerate(longer)}
    starts = [_in_order(first[s], f_start[:, s], b_start[:, s], int(rounds[s])).tolist() for s in range(stages)]
    return starts, free.tolist()


def _travel(back: Floats, down: Floats) -> Floats:
    """Time from a backward's start on each stage to where its chain of messages reaches stage 0, last stage most."""
    legs = back + down
    legs[0] = 0.0
    total = np.cumsum(legs)
    return np.asarray(total[-1] - total)


def _fill(forward: Floats, hold: Floats, up: Floats, warm_up: Ints, gates: Sequence[Gate]) -> list[Floats]:
    """Starts of the warm-up forwards of each stage; the first of each is made to last until its weights are there."""
    rows: list[Floats] = []
    for stage, number in enumerate(warm_up.tolist()):
        if number == 0:
            rows.append(np.zeros(0))
            continue
        arrivals = np.zeros(number)
        if stage > 0:
            arrivals = rows[stage - 1][:number] + forward[stage - 1, :number] + up[stage - 1]
        if gates:
            forward[stage, 0] = gates[stage].passed(arrivals[0], forward[stage, 0]) - arrivals[0]
        steps = np.concatenate([[0.0], np.cumsum(forward[stage, : number - 1] + hold[stage])])
        rows.append(np.maximum.accumulate(arrivals - steps) + steps)
    return rows


def _in_order(first: Floats, f_start: Floats, b_start: Floats, rounds: int) -> Floats:
    pairs = np.empty(2 * rounds)
    pairs[0::2] = f_start[:rounds]
    pairs[1::2] = b_start[:rounds]
    return np.concatenate([first, pairs, b_start[rounds:]])
