"""A table as text, in the CSV form of torch's pipelining.

One row a rank; a cell such as ``0F0``, ``1B3``, ``1I3`` or ``1W3`` (virtual stage, kind,
micro-batch); an empty cell for an idle slot. Two passes that torch runs together,
``(0F7;7B3)OVERLAP_F_B``, are read as one after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from ...topology.errors import InputError, Problem, input_error
from ..fields import MOST_DEGREE
from .action import LETTERS, Action, Kind
from .table import Table, check_table

_CELL = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)
_KINDS: dict[str, Kind] = {kind: kind for kind in LETTERS}
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def to_csv(table: Sequence[Sequence[Action]]) -> str:
    """The table as text, one row a rank."""
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def from_csv(text: str, where: str = "schedule") -> Table:
    """A table from CSV text.

    Empty cells are left out, since a rank waits as long as it has to. So are torch's cells for
    messages and gathers, which whoever plays the table places.

    Raises:
        InputError: Naming each cell that is no action, or why the table cannot be played.

    >>> print(to_csv(from_csv("0F0,,0B0,0F1,0B1\\n,1F0,1I0,(1F1;1B1)OVERLAP_F_B,1W0\\n")), end="")
    0F0,0B0,0F1,0B1
    1F0,1I0,1F1,1B1,1W0
    """
    table: Table = []
    problems: list[Problem] = []
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise input_error(f"is not CSV: {error}", where=where) from None
    for number, cells in enumerate(rows, start=1):
        row: list[Action] = []
        for cell in cells:
            for part in _parts(cell.strip()):
                read = _action(part)
                if isinstance(read, str):
                    problems.append(Problem(f"row {number}", read))
                elif read is not None:
                    row.append(read)
        if cells:
            table.append(row)
    if problems:
        raise InputError(where, problems[:20])
    check_table(table, where)
    return table


def _parts(cell: str) -> list[str]:
    """The cell, or the passes that it runs together."""
    together = _TOGETHER.fullmatch(cell) if cell.startswith("(") else None
    cells = together[1].split(";") if together else [cell]
    return [part.strip() for part in cells if part.strip()]


def _action(cell: str) -> Action | str | None:
    """The action of a cell, what is wrong with it, or None for a message."""
    match = _CELL.fullmatch(cell)
    if match is not None and match[2] in _MESSAGES:
        return None
    if match is None or not match[3]:
        return f"{cell[:40]!r} is no action; write stage, kind and micro-batch, such as 0F0 or 1B3"
    if match[2] not in _KINDS:
        return (
            f"{cell[:40]!r} has kind {match[2]}; there is F (forward), B (full backward), "
            "I (gradient of the input) and W (of the weights)"
        )
    stage, micro_batch = int(match[1]), int(match[3])
    if max(stage, micro_batch) >= MOST_DEGREE:
        return f"{cell[:40]!r} counts too far; stages and micro-batches are below {MOST_DEGREE}"
    return Action(_KINDS[match[2]], stage, micro_batch)
