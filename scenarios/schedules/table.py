"""The schedule table: for each pipeline rank an ordered list of actions.

The simulated run and the real run play the same table. It can be written and
read in the CSV form of torch's pipelining: one row a rank, cells such as
``0F0`` or ``1B3`` (stage, kind, micro-batch), an empty cell for an idle slot.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from ...topology.errors import InputError, Problem, input_error
from ..fields import MOST_DEGREE
from .action import Action, Kind, Schedule, action_of

Table = list[list[Action]]

_CELL = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)


def schedule_table(schedule: Schedule, stages: int, micro_batches: int) -> Table:
    """The table of a schedule, one list a rank.

    >>> from . import SCHEDULES
    >>> print(to_csv(schedule_table(SCHEDULES["1f1b"], stages=2, micro_batches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    codes = code_table(schedule, stages, micro_batches)
    return [[action_of(code, stage) for code in row] for stage, row in enumerate(codes)]


def code_table(schedule: Schedule, stages: int, micro_batches: int) -> list[Sequence[int]]:
    """The same table in compact form."""
    return [schedule.codes(stage, stages, micro_batches) for stage in range(stages)]


def in_flight(actions: Iterable[Action]) -> int:
    """The most micro-batches that are forward and not yet backward at once.

    >>> in_flight([Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)])
    2
    """
    now = peak = 0
    for action in actions:
        now += 1 if action.kind == "F" else -1
        peak = max(peak, now)
    return peak


def makespan(table: Table, forward_s: float, backward_s: float) -> float:
    """Seconds until the last action ends, with free messages and equal stages.

    Raises:
        InputError: If the table never ends: an action waits for one that cannot come.

    >>> from . import SCHEDULES
    >>> makespan(schedule_table(SCHEDULES["1f1b"], stages=4, micro_batches=8), forward_s=1.0, backward_s=2.0)
    33.0
    """
    last = max((action.stage for row in table for action in row), default=0)
    ended: dict[Action, float] = {}
    clock = [0.0] * len(table)
    position = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while position[rank] < len(row):
                action = row[position[rank]]
                needs = _needs(action, last)
                if any(need not in ended for need in needs):
                    break
                start = max([clock[rank]] + [ended[need] for need in needs])
                clock[rank] = ended[action] = start + (forward_s if action.kind == "F" else backward_s)
                position[rank] += 1
                moved = True
    stuck = [f"rank {r} before {row[position[r]]}" for r, row in enumerate(table) if position[r] < len(row)]
    if stuck:
        raise input_error(f"the schedule never ends: {', '.join(stuck[:4])} waits for an action that cannot come")
    return max(clock, default=0.0)


def _needs(action: Action, last: int) -> list[Action]:
    """The actions whose results an action reads."""
    _, stage, micro_batch = action
    if action.kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    needs = [Action("F", stage, micro_batch)]
    if stage < last:
        needs.append(Action("B", stage + 1, micro_batch))
    return needs


def check_table(table: Table, where: str = "") -> None:
    """Refuse a table in which a micro-batch is missed, done twice, done elsewhere, or waits for ever.

    Raises:
        InputError: With every such problem.
    """
    problems = []
    seen: dict[Action, int] = {}
    home: dict[int, int] = {}
    for rank, row in enumerate(table):
        for action in row:
            if action in seen:
                problems.append(Problem(f"rank {rank}", f"{action} stands twice"))
            seen[action] = rank
            if home.setdefault(action.stage, rank) != rank:
                problems.append(
                    Problem(f"rank {rank}", f"{action}: stage {action.stage} lives on rank {home[action.stage]}")
                )
    stages = 1 + max((action.stage for action in seen), default=-1)
    micro_batches = 1 + max((action.micro_batch for action in seen), default=-1)
    missing = stages * micro_batches * 2 - len(seen)
    if not seen:
        problems.append(Problem("", "holds no action"))
    elif missing:
        problems.append(
            Problem(
                "",
                f"{stages} stages and {micro_batches} micro-batches need {stages * micro_batches * 2} actions; "
                f"{missing} are missing",
            )
        )
    if problems:
        raise InputError(where, problems[:20])
    try:
        makespan(table, 1.0, 1.0)
    except InputError as error:
        raise InputError(where, error.problems) from None


def to_csv(table: Sequence[Sequence[Action]]) -> str:
    """The table as text, one row a rank."""
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def from_csv(text: str, where: str = "schedule") -> Table:
    """A table from CSV text; empty cells are idle slots and are left out.

    Raises:
        InputError: Naming each cell that is no action, or why the table cannot be played.
    """
    table: Table = []
    problems = []
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise input_error(f"is not CSV: {error}", where=where) from None
    for number, cells in enumerate(rows, start=1):
        row = []
        for cell in (cell.strip() for cell in cells):
            if cell:
                action = _action(cell)
                if isinstance(action, str):
                    problems.append(Problem(f"row {number}", action))
                else:
                    row.append(action)
        if cells:
            table.append(row)
    if problems:
        raise InputError(where, problems[:20])
    check_table(table, where)
    return table


def _action(cell: str) -> Action | str:
    """The action of a cell, or what is wrong with it."""
    match = _CELL.fullmatch(cell)
    if match is None or not match[3]:
        return f"{cell[:40]!r} is no action; write stage, kind and micro-batch, such as 0F0 or 1B3"
    kinds: dict[str, Kind] = {"F": "F", "B": "B"}
    if match[2] not in kinds:
        return f"{cell[:40]!r} has kind {match[2]}; there is F (forward) and B (full backward)"
    stage, micro_batch = int(match[1]), int(match[3])
    if max(stage, micro_batch) >= MOST_DEGREE:
        return f"{cell[:40]!r} counts too far; stages and micro-batches are below {MOST_DEGREE}"
    return Action(kinds[match[2]], stage, micro_batch)
