"""The schedule table: for each pipeline rank an ordered list of actions.

The simulated run and the real run play the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...topology.errors import InputError, Problem
from .action import Action, action_of, split_code
from .fit import misfits
from .schedule import Schedule
from .timing import makespan

Table = list[list[Action]]


def schedule_table(schedule: Schedule, ranks: int, micro_batches: int, chunks: int | None = None) -> Table:
    """The table of a schedule, one list a rank.

    Args:
        schedule: A member of ``SCHEDULES``, or one from a file.
        ranks: Pipeline ranks, ``pp``.
        micro_batches: Of one step of one replica.
        chunks: Virtual stages a rank; left out, the fewest that the schedule runs with.

    Raises:
        InputError: Where the schedule cannot be run so.

    >>> from . import SCHEDULES, to_csv
    >>> print(to_csv(schedule_table(SCHEDULES["1f1b"], ranks=2, micro_batches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    chunks = chunks or schedule.least_chunks
    table = []
    for rank, codes in enumerate(code_table(schedule, ranks, micro_batches, chunks)):
        stages = [schedule.stage_of(rank, chunk, ranks) for chunk in range(chunks)]
        table.append([action_of(code, stages[split_code(code, micro_batches)[1]], micro_batches) for code in codes])
    return table


def code_table(schedule: Schedule, ranks: int, micro_batches: int, chunks: int | None = None) -> list[Sequence[int]]:
    """The same table in compact form."""
    chunks = chunks or schedule.least_chunks
    problems = misfits(schedule, ranks, chunks, micro_batches)
    if problems:
        raise InputError(f"schedule {schedule.name}", problems)
    return [schedule.codes(rank, ranks, micro_batches, chunks) for rank in range(ranks)]


def in_flight(actions: Iterable[Action]) -> int:
    """The most passes that are forward and not yet wholly backward at once.

    >>> in_flight([Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)])
    2
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    now = peak = 0
    for action in actions:
        now += change[action.kind]
        peak = max(peak, now)
    return peak


def check_table(table: Table, where: str = "") -> None:
    """Refuse a table in which a micro-batch is missed, done twice, done elsewhere, or waits for ever.

    Raises:
        InputError: With every such problem.
    """
    problems = []
    seen: set[Action] = set()
    home: dict[int, int] = {}
    for rank, row in enumerate(table):
        for action in row:
            if action in seen:
                problems.append(Problem(f"rank {rank}", f"{action} stands twice"))
            seen.add(action)
            if home.setdefault(action.stage, rank) != rank:
                problems.append(
                    Problem(f"rank {rank}", f"{action}: stage {action.stage} lives on rank {home[action.stage]}")
                )
    problems += _gaps(seen)
    if not problems:
        try:
            makespan(table, 1.0, 2.0)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(where, problems[:20])


def _gaps(seen: set[Action]) -> list[Problem]:
    """What is missing, or is done both whole and by halves."""
    if not seen:
        return [Problem("", "holds no action")]
    to_input = {action[1:] for action in seen if action.kind == "I"}
    to_weight = {action[1:] for action in seen if action.kind == "W"}
    whole = {action[1:] for action in seen if action.kind == "B"}
    lone = [(Action("I", *at), Action("W", *at)) for at in sorted(to_input - to_weight)]
    lone += [(Action("W", *at), Action("I", *at)) for at in sorted(to_weight - to_input)]
    problems = [
        Problem("", f"{Action('B', *at)} stands beside its halves; a backward is whole or in two halves")
        for at in sorted(whole & (to_input | to_weight))
    ]
    problems += [Problem("", f"{other} is missing; {half} is one half of a backward") for half, other in lone]
    if problems:
        return problems
    stages = 1 + max(action.stage for action in seen)
    micro_batches = 1 + max(action.micro_batch for action in seen)
    wanted = stages * micro_batches * 2
    missing = wanted - (len(seen) - len(to_weight))  # two halves are one backward
    if missing:
        return [
            Problem(
                "",
                f"{stages} stages and {micro_batches} micro-batches need {wanted} actions; {missing} are missing",
            )
        ]
    return []
