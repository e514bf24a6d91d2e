"""Published runs, each a scenario on one line with what was measured of it.

One CSV file a series under ``validation/public/``; a column is a field of a
scenario file (``training.seq_len``, ``layout.tp``), or ``measured.`` and what
the source prints. A model is given by its fields, or by a bundled name and the
fields that differ. An empty cell is a field left out.

Which rows a fit may see was fixed before anything was fitted (`fit_rows`):
rows are pooled by the calibration that answers them, and of each pool those
whose id has the smallest SHA-256 are ``fit``; all others are ``unseen``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast, get_args

from ..topology.errors import input_error, nearest
from .measurements import Use
from .reading import PACKAGE
from .scenario import Scenario, scenario_from_document

MemoryKind = Literal["allocated", "reserved", "device"]
Verdict = Literal["fits", "oom"]

FEWEST_FIT, MOST_FIT = 3, 20
# Their fits see rows of `measured_runs` alone.
FITTED_ELSEWHERE = frozenset({"frontier", "lumi-g", "fugaku", "a100-nccl-deepspeed"})
_LEFT_OUT = "left_out.csv"
_TEXT = frozenset({"machine", "framework", "calibration", "model", "model.name"})
_PARTS = ("model", "training", "layout")


@dataclass(frozen=True)
class PublishedRun:
    """One published run; None where the source does not say.

    Attributes:
        id: The row's own name.
        series: The file that it stands in: a source, or one table of it.
        source: Key in docs/sources.md; ``where`` is the place in that source.
        use: ``fit``, ``unseen``, or ``context``, of which nothing is claimed.
        group: Rows of one name differ in nothing but their layout; empty for a row by itself.
        fields: The scenario, as its file would say it.
        step_s: Seconds of one step; where the source prints a rate, derived from it (``note`` says so).
        tflops: 1e12 FLOP/s of one device as printed, counted by ``flop_convention``.
        memory_bytes: Of the fullest device, as ``memory_kind`` is printed.
        verdict: ``oom`` where the run is said to have had too little memory.
    """

    id: str
    series: str
    source: str
    where: str
    use: Use
    group: str
    note: str
    fields: dict[str, Any]
    step_s: float | None
    tflops: float | None
    flop_convention: str | None
    memory_bytes: float | None
    memory_kind: MemoryKind | None
    verdict: Verdict | None

    @property
    def pool(self) -> tuple[str, bool]:
        """What one fit answers: the calibration, the machine's own where none is named; rows of memory alone apart."""
        return str(self.fields.get("calibration") or self.fields["machine"]), self.timed

    @property
    def timed(self) -> bool:
        """Whether a time or a rate was measured."""
        return self.step_s is not None or self.tflops is not None

    def ask(self) -> Scenario:
        """The scenario of this run.

        Raises:
            InputError: With everything that is wrong in its line.
        """
        return scenario_from_document(self.fields, self.id)


@dataclass(frozen=True)
class LeftOut:
    """A published run that cannot be held against a prediction, and why."""

    id: str
    source: str
    reason: str


@cache
def published_runs(series: str | None = None) -> tuple[PublishedRun, ...]:
    """All published runs, or those of one series, in the order of their files.

    >>> published_runs("mt-nlg")[0].ask().layout.pp
    35

    Raises:
        InputError: If there is no such series.
    """
    if series is None:
        return tuple(run for name in series_names() for run in published_runs(name))
    if series not in series_names():
        raise input_error(f"no series of published runs is called {series!r}{nearest(series, series_names())}")
    return tuple(_run(series, row) for row in _rows(f"{series}.csv"))


@cache
def series_names() -> tuple[str, ...]:
    """The series: one file each."""
    names = sorted(entry.name for entry in _folder().iterdir())
    return tuple(name[:-4] for name in names if name.endswith(".csv") and name != _LEFT_OUT)


def asked_runs(series: str | None = None) -> Iterator[tuple[PublishedRun, Scenario]]:
    """Each published run with its scenario.

    Raises:
        InputError: At the first row that is wrong.
    """
    for run in published_runs(series):
        yield run, run.ask()


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Published runs that are not used, with the reason."""
    return tuple(LeftOut(row["id"], row["source"], row["reason"]) for row in _rows(_LEFT_OUT))


def fit_rows(runs: Iterable[PublishedRun]) -> frozenset[str]:
    """The ids of the rows that fits may see, by the rule alone.

    Of each pool of n rows, rows of context left aside, those with the smallest
    SHA-256 of their id: n / 10 of them, at least 3 and at most 20, and never
    more than half of the pool. Frontier, LUMI-G and Fugaku keep the fits that
    they had before these rows came.
    """
    pools: dict[tuple[str, bool], list[str]] = {}
    for run in runs:
        if run.use != "context" and FITTED_ELSEWHERE.isdisjoint((run.fields["machine"], run.pool[0])):
            pools.setdefault(run.pool, []).append(run.id)
    chosen: set[str] = set()
    for ids in pools.values():
        count = min(MOST_FIT, max(FEWEST_FIT, len(ids) // 10), len(ids) // 2)
        chosen.update(sorted(ids, key=_digest)[:count])
    return frozenset(chosen)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _folder() -> Any:
    return resources.files(PACKAGE) / "validation" / "public"


def _rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((_folder() / name).read_text(encoding="utf-8"))))


def _run(series: str, row: dict[str, str]) -> PublishedRun:
    kind, verdict = row.get("measured.memory_kind") or None, row.get("measured.verdict") or None
    if row["use"] not in get_args(Use) or kind not in (None, *get_args(MemoryKind)):
        raise ValueError(f"{row['id']}: use is {row['use']!r}, kind of memory {kind!r}")
    if verdict not in (None, *get_args(Verdict)):
        raise ValueError(f"{row['id']}: verdict is {verdict!r}")
    return PublishedRun(
        id=row["id"],
        series=series,
        source=row["source"],
        where=row["where"],
        use=cast(Use, row["use"]),
        group=row["group"],
        note=row["note"],
        fields=_fields(row),
        step_s=_number(row, "measured.step_s"),
        tflops=_number(row, "measured.tflops"),
        flop_convention=row.get("measured.flop_convention") or None,
        memory_bytes=_number(row, "measured.memory_bytes"),
        memory_kind=cast(MemoryKind | None, kind),
        verdict=cast(Verdict | None, verdict),
    )


def _fields(row: dict[str, str]) -> dict[str, Any]:
    """The scenario file that a line stands for."""
    fields: dict[str, Any] = {"name": row["id"]}
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for column, text in row.items():
        head, _, name = column.partition(".")
        if not text or head == "measured":
            continue
        if head in parts and name:
            parts[head][name] = _value(column, text)
        elif column in ("machine", "framework", "calibration", "model", "devices"):
            fields[column] = _value(column, text)
    if "model" in fields and parts["model"]:
        from .model import model_document

        parts["model"] = model_document(fields["model"])[0] | parts["model"]
    return fields | {part: values for part, values in parts.items() if values}


def _value(column: str, text: str) -> Any:
    """A cell as YAML would read it; JSON is the quick part of that."""
    if column in _TEXT:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(row: dict[str, str], column: str) -> float | None:
    return float(row[column]) if row.get(column) else None
