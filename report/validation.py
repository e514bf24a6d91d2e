"""Predictions beside what was measured: on the terminal, and as the tables of docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ..topology.units import format_bytes, format_duration, format_flop_rate
from .terminal import Screen, indented, plain_table, spaced
from .words import percent, signed_percent

if TYPE_CHECKING:
    from ..twin.validate import Summary, Validation, ValidationRow

TITLES = {
    "step": "step time",
    "rate": "hardware FLOP/s of a device",
    "memory": "max allocated memory of a stage",
    "collective": "one collective or message",
}
SHOW = {"step": format_duration, "rate": format_flop_rate, "memory": format_bytes, "collective": format_duration}
USES = {
    "unseen": "no calibration has seen these rows",
    "fit": "a calibration was fitted on these rows",
    "context": "other software, an outlier, or too little said: nothing is claimed",
}


def validation_view(outcome: Validation, screen: Screen) -> Sequence[RenderableType]:
    """Every row by quantity and use, the errors of each group, and the verdict."""
    outside = [row for row in outcome.rows if not row.within]
    verdict = (
        Text(f"{len(outside)} of {len(outcome.rows)} rows lie outside their bound", style="bold red")
        if outside
        else Text(f"all {len(outcome.rows)} rows keep to their bounds", style="bold green")
    )
    return spaced([*(_group(outcome, summary, screen) for summary in outcome.summaries()), verdict])


def validation_markdown(outcome: Validation) -> str:
    """The same as Markdown tables."""
    lines = ["| quantity | rows used as | rows | median error | mean error | worst | bias |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|"]
    for group in outcome.summaries():
        sizes = (percent(group.median_absolute), percent(group.mean_absolute))
        cells = (TITLES[group.quantity], group.use, str(group.rows), *sizes, signed_percent(group.worst))
        lines += [_line(*cells, signed_percent(group.bias))]
    for group in outcome.summaries():
        lines += ["", f"## {_sentence(TITLES[group.quantity])}: {group.use}", "", f"{_sentence(USES[group.use])}.", ""]
        lines += ["| row | source | measured | predicted | error | bound |", "|---|---|--:|--:|--:|--:|"]
        for row in _members(outcome, group):
            show = SHOW[row.quantity]
            error = signed_percent(row.error) if row.within else f"**{signed_percent(row.error)}**"
            lines += [_line(row.id, f"`{row.source}`", show(row.measured), show(row.predicted), error, _bound(row))]
    return "\n".join(lines) + "\n"


def _group(outcome: Validation, group: Summary, screen: Screen) -> RenderableType:
    show = SHOW[group.quantity]
    columns = ("measured", "predicted", "error", "bound") if screen.roomy else ("measured", "error", "bound")
    table = plain_table(f"{TITLES[group.quantity]}: {group.use}", *columns)
    for row in _members(outcome, group):
        predicted = [show(row.predicted)] if screen.roomy else []
        style = None if row.within else "bold red"
        table.add_row(row.id, show(row.measured), *predicted, signed_percent(row.error), _bound(row), style=style)
    note = (
        f"{USES[group.use]}; error {percent(group.median_absolute)} in the median, "
        f"{percent(group.mean_absolute)} in the mean, worst {signed_percent(group.worst)}, "
        f"bias {signed_percent(group.bias)}"
    )
    return Group(table, indented(note, "dim"))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _members(outcome: Validation, group: Summary) -> list[ValidationRow]:
    return [row for row in outcome.rows if (row.quantity, row.use) == (group.quantity, group.use)]


def _bound(row: ValidationRow) -> str:
    return "" if row.bound is None else f"{row.bound * 100:.0f} %"
