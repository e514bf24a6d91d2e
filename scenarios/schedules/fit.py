"""Whether a schedule can be run on so many ranks, chunks and micro-batches."""

from __future__ import annotations

from ...topology.errors import Problem, nearest_numbers
from .schedule import Schedule


def misfits(schedule: Schedule, ranks: int, chunks: int, micro_batches: int | None = None) -> list[Problem]:
    """What stands against it, by the field of a scenario that would have to change.

    Args:
        schedule: The schedule asked for.
        ranks: ``layout.pp``.
        chunks: ``layout.vpp``.
        micro_batches: Of a step of a replica; None where they are not known yet.

    >>> from . import SCHEDULES
    >>> print(misfits(SCHEDULES["zb-v"], ranks=4, chunks=1)[0])
    layout.vpp: vpp=1 is no number of virtual stages a rank for schedule zb-v; it can be 2
    """
    problems = []
    name = schedule.name
    if schedule.shape is not None and schedule.shape[0] != ranks:
        problems.append(
            Problem(
                "layout.pp",
                f"pp={ranks} is not the {schedule.shape[0]} ranks of schedule {name}; it can be {schedule.shape[0]}",
            )
        )
    if schedule.chunks is not None and chunks not in schedule.chunks:
        valid = nearest_numbers(chunks, schedule.chunks)
        problems.append(
            Problem(
                "layout.vpp",
                f"vpp={chunks} is no number of virtual stages a rank for schedule {name}; it can be {valid}",
            )
        )
    elif chunks < schedule.least_chunks:
        problems.append(
            Problem(
                "layout.vpp",
                f"vpp={chunks} leaves nothing to interleave for schedule {name}; "
                f"it can be {schedule.least_chunks} or more, or schedule 1f1b",
            )
        )
    if micro_batches is None or problems:
        return problems
    least = schedule.least_micro_batches(ranks)
    if schedule.shape is not None and schedule.shape[1] != micro_batches:
        problems.append(
            Problem(
                "training.global_batch",
                f"gives each replica {micro_batches} micro-batches, and schedule {name} "
                f"is a table of {schedule.shape[1]}; global_batch can be micro_batch x dp x {schedule.shape[1]}",
            )
        )
    elif micro_batches < least:
        problems.append(
            Problem(
                "training.global_batch",
                f"gives each replica {micro_batches} micro-batches, and schedule {name} "
                f"needs {least} on {ranks} ranks; global_batch can be micro_batch x dp x {least} or more",
            )
        )
    return problems
