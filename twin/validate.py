"""Predictions beside every published measurement that is bundled.

Rows that a calibration was fitted on, rows that it never saw and rows of context
(other software, known outliers) are kept apart; accuracy is quoted on the unseen.
``scenarios/validation/bounds.yaml`` states the errors; one that grows beyond is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..scenarios.measurements import measured_collectives, measured_run, measured_runs
from ..scenarios.published import published_runs, series_names
from ..topology.errors import input_error, nearest
from . import validation_sums as sums
from .bounds import Breach, bounded, breaches
from .validation_rows import KINDS, Unanswered, ValidationRow
from .validation_tasks import Progress, Task, answer_tasks

FAST_ROWS = 4  # of each series


@dataclass(frozen=True)
class Validation:
    """All rows, in the order of their files, and the runs that could not be predicted."""

    rows: tuple[ValidationRow, ...]
    unanswered: tuple[Unanswered, ...] = ()
    breaches: tuple[Breach, ...] = ()

    @property
    def within(self) -> bool:
        """Whether every row and every series keeps to its bound, and no prediction failed."""
        return all(row.within for row in self.rows) and not self.breaches and not self.faults

    @property
    def faults(self) -> tuple[Unanswered, ...]:
        """Predictions that failed by a fault of ours."""
        return tuple(item for item in self.unanswered if item.fault)

    def summaries(self, by: str = "all") -> tuple[sums.Summary, ...]:
        """Errors by ``all``, ``source`` or ``device``, each by kind and use."""
        return sums.summaries(self.rows, by)

    def document(self, version: str, *, rows: bool = True) -> dict[str, Any]:
        """The JSON document of ``exatwin validate --json``."""
        document: dict[str, Any] = {
            "schema_version": 2,
            "within": self.within,
            "summaries": [dataclasses.asdict(group) for by in sums.GROUPINGS for group in self.summaries(by)],
            "rankings": [dataclasses.asdict(item) for item in sums.rankings(self.rows)],
            "scalings": [dataclasses.asdict(item) for item in sums.scalings(self.rows)],
            "suspects": [item.document() for item in sums.suspects(self.rows)],
            "breaches": [dataclasses.asdict(item) for item in self.breaches],
            "not_simulated": [dataclasses.asdict(item) for item in self.unanswered],
            "exatwin_version": version,
        }
        if rows:
            document["rows"] = [
                {**dataclasses.asdict(row), "kind": row.kind, "within": row.within} for row in self.rows
            ]
        return document


def validate(
    source: str | None = None,
    device: str | None = None,
    kind: str | None = None,
    *,
    fast: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Predict what was measured.

    Args:
        source: A series of rows or a key of docs/sources.md; all where left out.
        device: A device's name or a part of it.
        kind: ``time``, ``memory``, ``verdict`` or ``message``.
        fast: A few rows of each series, for tests.
        jobs: Processes; as many as the host has where left out.
        progress: Told the runs done and the runs in all.

    Raises:
        InputError: If there is no such source, device or kind.
    """
    kinds = set(KINDS.values())
    if kind is not None and kind not in kinds:
        raise input_error(f"{kind!r} is unknown{nearest(kind, kinds)}", field="kind")
    tasks = _chosen(all_tasks(), source, device)
    if fast:
        tasks = fast_tasks(tasks)
    answers = answer_tasks(tasks, jobs, progress)
    rows = [answer for answer in answers if isinstance(answer, ValidationRow) and kind in (None, answer.kind)]
    rows = [bounded(row) for row in rows]
    unanswered = tuple(answer for answer in answers if isinstance(answer, Unanswered))
    whole = not (fast or device)
    return Validation(tuple(rows), unanswered, breaches(rows) if whole else ())


def all_tasks() -> list[Task]:
    """Every run and message, in the order of their files."""
    measured = [
        Task("run", run.source, run.id)
        for run in measured_runs()
        if run.scenario and (run.step_s is not None or run.tflops_hardware is not None)
    ]
    messages = [Task("message", item.source, item.id) for item in measured_collectives() if item.use != "context"]
    return [*measured, *messages, *(Task("public", run.series, run.id) for run in published_runs())]


def fast_tasks(tasks: Sequence[Task]) -> list[Task]:
    """A few of each series, chosen by the hash of their names alone: those that come last, which no fit sees first."""
    chosen: set[Task] = set()
    by_series: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        by_series.setdefault((task.kind, task.series), []).append(task)
    for members in by_series.values():
        chosen.update(sorted(members, key=lambda task: hashlib.sha256(task.id.encode()).hexdigest())[-FAST_ROWS:])
    return [task for task in tasks if task in chosen]


def _chosen(tasks: Iterable[Task], source: str | None, device: str | None) -> list[Task]:
    """The tasks of a source and a device."""
    chosen = list(tasks)
    if source is not None:
        keys = {run.id: run.source for run in published_runs()}
        named = [task for task in chosen if source == task.series] or [
            task for task in chosen if source == keys.get(task.id)
        ]
        if not named:
            known = {*series_names(), *(task.series for task in chosen)}
            raise input_error(f"no published run has the source {source!r}{nearest(source, known)}", field="source")
        chosen = named
    if device is not None:
        from ..topology.machine import load_machine, machine_names

        names = {name: load_machine(name).device.name for name in machine_names()}
        wanted = {name for name, device_name in names.items() if device.lower() in device_name.lower()}
        if not wanted:
            message = f"no bundled device is called {device!r}{nearest(device, names.values())}"
            raise input_error(message, field="device")
        machines = {run.id: str(run.fields["machine"]) for run in published_runs()}
        chosen = [task for task in chosen if _machine_of(task, machines) in wanted]
    return chosen


def _machine_of(task: Task, machines: Mapping[str, str]) -> str:
    """The bundled name of the machine of a task."""
    if task.kind == "public":
        return machines[task.id]
    if task.kind == "run":
        return measured_run(task.id).ask().machine.name
    return next(item for item in measured_collectives() if item.id == task.id).ask().machine.name
