"""Pipeline schedules: one table for the simulated and the real run.

One more schedule is one module and one line in ``SCHEDULES``; the tests that
every member must pass find it there.
"""

from __future__ import annotations

from .action import BACKWARD, FORWARD, KINDS, Action, Schedule, action_of
from .gpipe import GPipe
from .one_f_one_b import OneForwardOneBackward
from .table import Table, check_table, code_table, from_csv, in_flight, makespan, schedule_table, to_csv

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in (OneForwardOneBackward(), GPipe())}

__all__ = [
    "BACKWARD",
    "FORWARD",
    "KINDS",
    "SCHEDULES",
    "Action",
    "Schedule",
    "Table",
    "action_of",
    "check_table",
    "code_table",
    "from_csv",
    "in_flight",
    "makespan",
    "schedule_table",
    "to_csv",
]
