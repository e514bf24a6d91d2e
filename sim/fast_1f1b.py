"""The recurrence of 1F1B for all stages at once: the same times as the walk over its table, ten times sooner.

After its ``w = min(p - s - 1, m)`` first forwards, stage s alternates: forward ``w + i``,
backward ``i``. So round i of every stage needs only round i - 1 of itself and of the stage
before it, and, for the backward, round i of the stage after it, which is a running maximum
along the stages. `exatwin.sim.recurrence` tells what is being computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..scenarios.schedules import BACKWARD, FORWARD
from .timeline import Program

Floats = npt.NDArray[np.float64]


def play_1f1b(program: Program) -> tuple[list[list[float]], list[float]]:
    """When every action of a 1F1B step starts, a list a stage in the order of its actions, and when each stage is free.

    Args:
        program: A step whose table is that of 1F1B.
    """
    stages, count = program.stages, program.micro_batches
    up = [program.forward_s[s] + program.travels(s, FORWARD) for s in range(stages - 1)]
    down = [program.backward_s[s] + program.travels(s, BACKWARD) for s in range(1, stages)]
    forward = np.array([program.forward_s[s] + program.holds(s, FORWARD) for s in range(stages)])
    backward = np.array([program.backward_s[s] + program.holds(s, BACKWARD) for s in range(stages)])
    warm_up = np.minimum(stages - 1 - np.arange(stages), count)

    first = _fill(forward, up, warm_up, count)
    free = np.array([row[-1] + forward[s] if len(row) else 0.0 for s, row in enumerate(first)])
    # Arrival of the forward of each stage's round 0: the last warm-up forward of the stage before it.
    arrival = np.zeros(stages)
    for stage in range(1, stages):
        before = first[stage - 1]
        arrival[stage] = before[warm_up[stage]] + up[stage - 1] if warm_up[stage] < len(before) else 0.0

    f_start = np.zeros((count, stages))
    b_start = np.zeros((count, stages))
    # Time from a backward's start back along the stages: what the stage s + 1 sends reaches s after down[s].
    travel = np.concatenate([np.cumsum(np.array(down)[::-1])[::-1], [0.0]]) if stages > 1 else np.zeros(1)
    up_row = np.concatenate([[0.0], np.array(up)]) if stages > 1 else np.zeros(1)
    full = count - warm_up  # rounds in which a stage still has a forward
    least = int(full.min())
    for i in range(count):
        start = np.maximum(free, arrival)
        f_start[i] = start
        ready = start + forward
        if i >= least:
            ready = np.where(i < full, ready, free)
        # b[s] = max(ready[s], b[s + 1] + down[s]), from the last stage to the first
        begins = np.maximum.accumulate((ready - travel)[::-1])[::-1] + travel
        b_start[i] = begins
        free = begins + backward
        arrival[1:] = start[:-1] + up_row[1:]
    starts = [_in_order(first[s], f_start[:, s], b_start[:, s], int(full[s])).tolist() for s in range(stages)]
    return starts, free.tolist()


def _fill(forward: Floats, up: list[float], warm_up: npt.NDArray[np.int64], count: int) -> list[Floats]:
    """Starts of the warm-up forwards of each stage."""
    rows: list[Floats] = []
    for stage, number in enumerate(warm_up.tolist()):
        steps = np.arange(number) * forward[stage]
        arrivals = np.zeros(number) if stage == 0 else rows[stage - 1][:number] + up[stage - 1]
        rows.append(np.maximum.accumulate(arrivals - steps) + steps if number else np.zeros(0))
    return rows


def _in_order(first: Floats, f_start: Floats, b_start: Floats, rounds: int) -> Floats:
    pairs = np.empty(2 * rounds)
    pairs[0::2] = f_start[:rounds]
    pairs[1::2] = b_start[:rounds]
    return np.concatenate([first, pairs, b_start[rounds:]])
