"""The errors that are stated: ``scenarios/validation/bounds.yaml``, read, held against rows, and written anew."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from .validation_rows import ValidationRow
from .validation_sums import Summary, summaries

FIGURES = ("median", "p90")  # of a series; ``worst`` bounds each of its rows
_STEP = 0.005  # bounds are written in half per cents
_ROOM = 1.1  # a bound is written a tenth above the error that it is to hold


@dataclass(frozen=True)
class Breach:
    """A series whose errors have grown beyond what is stated."""

    series: str
    kind: str
    figure: str
    error: float
    bound: float


@cache
def stated_bounds() -> dict[str, Any]:
    """The file: bounds of ``series`` by kind, of ``each`` row by series and quantity, and of single ``rows``."""
    text = (resources.files("exatwin.scenarios") / "validation" / "bounds.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def bounded(row: ValidationRow) -> ValidationRow:
    """A row with the bound that is stated for it alone, if there is one."""
    stated = stated_bounds()
    bound = stated["rows"].get(row.id)
    if bound is None:
        bound = stated["each"].get(row.series, {}).get(row.quantity)
    if bound is None and row.use == "unseen":
        bound = stated["series"].get(row.series, {}).get(row.kind, {}).get("worst")
    if bound is None or row.use == "context":
        return row
    return dataclasses.replace(row, bound=float(bound))


def breaches(rows: Iterable[ValidationRow]) -> tuple[Breach, ...]:
    """Series whose unseen rows are farther off, in the median or for one in ten, than is stated."""
    stated = stated_bounds()["series"]
    found = []
    for group in summaries(rows, "source"):
        bounds = stated.get(group.name, {}).get(group.kind, {}) if group.use == "unseen" else {}
        found += [
            Breach(group.name, group.kind, figure, getattr(group, figure), bound)
            for figure, bound in bounds.items()
            if figure in FIGURES and getattr(group, figure) > bound
        ]
    return tuple(found)


def bounds_text(rows: Iterable[ValidationRow]) -> str:
    """`bounds_for` as YAML, in the form of the file."""
    return str(yaml.safe_dump({"series": bounds_for(rows)}, default_flow_style=None, sort_keys=False, width=120))


def bounds_for(rows: Iterable[ValidationRow]) -> dict[str, dict[str, dict[str, float]]]:
    """Bounds that the rows keep: a tenth above their errors, in half per cents.

    Verdicts have none, and neither have the series whose rows are bounded one by one.
    """
    each = stated_bounds()["each"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for group in summaries(rows, "source"):
        if group.use == "unseen" and group.kind != "verdict" and group.name not in each:
            found.setdefault(group.name, {})[group.kind] = _bounds_of(group)
    return found


def _bounds_of(group: Summary) -> dict[str, float]:
    figures = (*FIGURES, "worst")
    return {figure: round(math.ceil(abs(getattr(group, figure)) * _ROOM / _STEP) * _STEP, 3) for figure in figures}
