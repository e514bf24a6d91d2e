"""The network beside benchmarks that were published: on the terminal, as Markdown, as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from .._version import __version__
from ..topology.units import format_bytes, format_duration
from .terminal import Screen, indented, plain_table, spaced
from .words import percent, signed_percent

if TYPE_CHECKING:
    from ..twin.network_validation import NetworkRow, NetworkSummary, NetworkValidation

SIZES = {"large": "from 1 MiB on", "small": "below 1 MiB"}
ROW_HEADS = ("row", "how", "size", "measured", "predicted", "ratio", "used as")
NOTE = "errors are predicted over measured, less one; a calibration has seen the rows used as fit"


def network_document(outcome: NetworkValidation) -> dict[str, Any]:
    """Every row with its ratio, and the errors of each group."""
    from ..twin.network_validation import BOUNDS

    return {
        "schema_version": 1,
        "within": outcome.within,
        "median_bounds": BOUNDS,
        "summaries": [asdict(summary) for by in ("all", "op") for summary in outcome.summaries(by)],
        "rows": [{**asdict(row), "ratio": row.ratio} for row in outcome.rows],
        "exatwin_version": __version__,
    }


def network_view(outcome: NetworkValidation, screen: Screen, *, rows: bool = False) -> Sequence[RenderableType]:
    """The errors of each group of rows, if asked every row, and the verdict on those that no fit has seen."""
    more = ("worst", "bias") if screen.roomy else ()
    table = plain_table("machine", "message", "size", "used as", "rows", "median", *more, left=("message", "size"))
    for group in _groups(outcome):
        figures = (group.median, group.worst, group.bias)
        shown = [percent(figures[0]), *(signed_percent(figure) for figure in figures[1:])][: 1 + len(more)]
        style = "bold" if group.machine == "all" else None
        table.add_row(group.machine, *_words(group), group.use, f"{group.rows}", *shown, style=style)
    verdict = "the medians of rows that no fit has seen keep to their bounds" if outcome.within else _outside(outcome)
    styled = Text(f"{verdict} ({_bounds()})", style="bold green" if outcome.within else "bold red")
    return spaced([*([_rows_table(outcome)] if rows else []), table, indented(NOTE, "dim"), styled])


def _rows_table(outcome: NetworkValidation) -> RenderableType:
    table = plain_table(*ROW_HEADS, left=("how", "size", "used as"))
    for row in outcome.rows:
        table.add_row(*_row_cells(row))
    return table


def _row_cells(row: NetworkRow) -> tuple[str, ...]:
    how = row.algorithm if row.protocol == "simple" else f"{row.algorithm}, {row.protocol}"
    times = (format_duration(row.measured), format_duration(row.predicted), f"{row.ratio:.2f}")
    return (row.id, how, format_bytes(row.size_bytes), *times, row.use)


def network_markdown(outcome: NetworkValidation, *, rows: bool = False) -> str:
    """The same as Markdown tables."""
    lines = ["| machine | message | size | rows used as | rows | median error | worst | bias |"]
    lines += ["|---|---|---|---|--:|--:|--:|--:|"]
    for group in _groups(outcome):
        cells = (group.machine, *_words(group), group.use, f"{group.rows}", percent(group.median))
        lines.append(f"| {' | '.join((*cells, signed_percent(group.worst), signed_percent(group.bias)))} |")
    if rows:
        lines += ["", f"| {' | '.join((*ROW_HEADS, 'source'))} |", "|---|---|---|--:|--:|--:|---|---|"]
        lines += [f"| {' | '.join((*_row_cells(row), f'`{row.source}`'))} |" for row in outcome.rows]
    return "\n".join(lines) + "\n"


def _groups(outcome: NetworkValidation) -> list[NetworkSummary]:
    """All rows together first, then by machine and message; unseen rows before fitted ones."""
    by_op = sorted(outcome.summaries("op"), key=lambda group: (group.machine, group.op, group.size_class))
    groups = [*sorted(outcome.summaries("all"), key=lambda group: group.size_class), *by_op]
    return sorted(groups, key=lambda group: (group.machine != "all", group.use == "fit"))


def _words(group: NetworkSummary) -> tuple[str, str]:
    return group.op.replace("_", "-"), SIZES[group.size_class]


def _outside(outcome: NetworkValidation) -> str:
    from ..twin.network_validation import BOUNDS

    missed = [
        f"{percent(group.median)} {SIZES[group.size_class]}"
        for group in outcome.summaries("all")
        if group.use == "unseen" and group.median > BOUNDS[group.size_class]
    ]
    return f"the medians of rows that no fit has seen lie outside: {', '.join(missed)}"


def _bounds() -> str:
    from ..twin.network_validation import BOUNDS

    return ", ".join(f"{bound:.0%} {SIZES[size]}".replace("%", " %") for size, bound in BOUNDS.items())
