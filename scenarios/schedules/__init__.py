"""Pipeline schedules: one table for the simulated and the real run.

One more schedule is one module and one line in `library.SCHEDULES`; the tests that
every member must pass find it there.
"""

from __future__ import annotations

from .action import BACKWARD, FORWARD, INPUT_GRAD, KINDS, LETTERS, WEIGHT_GRAD, Action, action_of, most_held, split_code
from .fit import misfits
from .from_file import FileSchedule, is_file
from .library import SCHEDULES, load_schedule
from .picture import picture
from .schedule import Schedule
from .table import Table, check_table, code_table, in_flight, schedule_table
from .text import from_csv, to_csv
from .timing import durations, makespan, start_times

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT_GRAD",
    "KINDS",
    "LETTERS",
    "SCHEDULES",
    "WEIGHT_GRAD",
    "Action",
    "FileSchedule",
    "Schedule",
    "Table",
    "action_of",
    "check_table",
    "code_table",
    "durations",
    "from_csv",
    "in_flight",
    "is_file",
    "load_schedule",
    "makespan",
    "misfits",
    "most_held",
    "picture",
    "schedule_table",
    "split_code",
    "start_times",
    "to_csv",
]
