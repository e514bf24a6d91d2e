"""When the actions of a table start, with free messages and equal stages."""

from __future__ import annotations

from collections.abc import Sequence

from ...topology.errors import input_error
from .action import Action


def makespan(
    table: Sequence[Sequence[Action]],
    forward_s: float,
    backward_s: float,
    input_s: float | None = None,
    weight_s: float | None = None,
) -> float:
    """Seconds until the last action ends, with free messages and equal stages.

    Args:
        table: Actions of each rank.
        forward_s: One micro-batch forward through one virtual stage.
        backward_s: The same backward.
        input_s: Of that, the gradient of the input; left out, half.
        weight_s: The gradient of the weights; left out, what the input leaves.

    Raises:
        InputError: If the table never ends: an action waits for one that cannot come.

    >>> from . import SCHEDULES, schedule_table
    >>> makespan(schedule_table(SCHEDULES["1f1b"], ranks=4, micro_batches=8), forward_s=1.0, backward_s=2.0)
    33.0
    >>> makespan(schedule_table(SCHEDULES["zb-h1"], ranks=4, micro_batches=8), forward_s=1.0, backward_s=2.0)
    27.0
    """
    seconds = durations(forward_s, backward_s, input_s, weight_s)
    starts = start_times(table, seconds)
    return max(
        (row[-1] + seconds[actions[-1].kind] for row, actions in zip(starts, table, strict=True) if row), default=0.0
    )


def durations(
    forward_s: float, backward_s: float, input_s: float | None = None, weight_s: float | None = None
) -> dict[str, float]:
    """Seconds of each kind of action.

    >>> durations(1.0, 2.0)
    {'F': 1.0, 'B': 2.0, 'I': 1.0, 'W': 1.0}
    """
    if input_s is None:
        input_s = backward_s / 2 if weight_s is None else backward_s - weight_s
    return {
        "F": forward_s,
        "B": backward_s,
        "I": input_s,
        "W": backward_s - input_s if weight_s is None else weight_s,
    }


def start_times(table: Sequence[Sequence[Action]], seconds: dict[str, float]) -> list[list[float]]:
    """When each action starts, in the order of the table.

    A forward needs the forward of the stage before; a backward, or its input half, its own forward
    and the gradient from the stage after; a weight gradient its own input gradient. A rank does one
    thing at a time.

    Raises:
        InputError: If the table never ends.
    """
    last = max((action.stage for row in table for action in row), default=0)
    forwards: dict[tuple[int, int], float] = {}  # when a micro-batch has left a stage, and has come back from it
    gradients: dict[tuple[int, int], float] = {}
    clock = [0.0] * len(table)
    starts: list[list[float]] = [[] for _ in table]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            done = starts[rank]
            while len(done) < len(row):
                kind, stage, micro_batch = row[len(done)]
                here, ready = (stage, micro_batch), clock[rank]
                if kind == "F":
                    needs = [forwards.get((stage - 1, micro_batch))] if stage else []
                elif kind == "W":
                    needs = [gradients.get(here)]
                else:
                    needs = [forwards.get(here)]
                    if stage < last:
                        needs.append(gradients.get((stage + 1, micro_batch)))
                come = [need for need in needs if need is not None]
                if len(come) < len(needs):
                    break
                ready = max([ready, *come])
                done.append(ready)
                clock[rank] = ready + seconds[kind]
                if kind == "F":
                    forwards[here] = clock[rank]
                elif kind != "W":
                    gradients[here] = clock[rank]
                moved = True
    stuck = [f"rank {r} before {row[len(starts[r])]}" for r, row in enumerate(table) if len(starts[r]) < len(row)]
    if stuck:
        raise input_error(f"the schedule never ends: {', '.join(stuck[:4])} waits for an action that cannot come")
    return starts
