"""A table as a picture in text: one line a rank, time to the right."""

from __future__ import annotations

from collections.abc import Sequence

from .action import Action
from .timing import durations, start_times


def picture(table: Sequence[Sequence[Action]]) -> list[str]:
    """The table played with free messages, where a forward takes one slot and a full backward two.

    Each half of a backward takes one slot. A cell has its kind and micro-batch, in capitals for the first of a
    rank's stages; dots are slots in which a rank waits.

    >>> from . import SCHEDULES, schedule_table
    >>> print("\\n".join(picture(schedule_table(SCHEDULES["1f1b"], ranks=2, micro_batches=2))))
    F0F1....B0--..B1--
    ..F0B0--F1B1--....
    """
    seconds = durations(1.0, 2.0)
    starts = start_times(table, seconds)
    width = 1 + max((len(str(action.micro_batch)) for row in table for action in row), default=1)
    end = max(
        (int(start[-1] + seconds[row[-1].kind]) for start, row in zip(starts, table, strict=True) if row), default=0
    )
    lines = []
    for start, row in zip(starts, table, strict=True):
        first = min((action.stage for action in row), default=0)
        line = ["." * width] * end
        for begin, (kind, stage, micro_batch) in zip(start, row, strict=True):
            slots = int(seconds[kind])
            cell = f"{kind if stage == first else kind.lower()}{micro_batch}"
            line[int(begin) : int(begin) + slots] = [cell.ljust(width), *["-" * width] * (slots - 1)]
        lines.append("".join(line))
    return lines
