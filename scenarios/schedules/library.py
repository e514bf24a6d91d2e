"""The schedules by name."""

from __future__ import annotations

from ...topology.errors import input_error, nearest
from .dualpipe_v import DualPipeV
from .from_file import is_file, read_schedule
from .gpipe import GPipe
from .one_f_one_b import Interleaved, OneForwardOneBackward
from .schedule import Schedule
from .zb_h1 import ZeroBubbleH1
from .zb_v import ZeroBubbleV

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (OneForwardOneBackward(), GPipe(), Interleaved(), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV())
}


def load_schedule(name_or_path: str) -> Schedule:
    """A schedule by its name, or from a CSV file.

    Raises:
        InputError: If there is none, or the file's table cannot be played.

    >>> load_schedule("zb-v").chunks
    (2,)
    """
    if name_or_path in SCHEDULES:
        return SCHEDULES[name_or_path]
    if is_file(name_or_path):
        return read_schedule(name_or_path)
    shown = name_or_path[:40]
    raise input_error(f"unknown schedule {shown!r}{nearest(shown, SCHEDULES)}; or give a .csv file")
