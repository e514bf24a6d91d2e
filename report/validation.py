"""Predictions beside what was measured: on the terminal, and as the tables of docs/accuracy.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ..topology.units import format_bytes, format_duration, format_flop_rate
from .terminal import Screen, indented, plain_table, spaced
from .words import percent, signed_percent

if TYPE_CHECKING:
    from ..twin.validate import Validation
    from ..twin.validation_rows import ValidationRow
    from ..twin.validation_sums import Summary

KINDS = {"time": "step time or rate", "memory": "memory", "verdict": "fits or not", "message": "one message"}
USES = {
    "unseen": "no calibration has seen these rows",
    "fit": "a calibration was fitted on these rows",
    "context": "other software, an outlier, or too little said: nothing is claimed",
}
HEADS = ("rows", "median", "mean", "p90", "bias")
ROW_HEADS = ("row", "source", "used as", "measured", "predicted", "error", "bound")
SHOWN_SCALINGS = 15
SHOWN_GROUPS = 5  # groups of so few rows are left out of the page
SUSPECT_NOTE = (
    "part: the part of the step whose share exceeds most what well predicted rows of the same machine have;"
    " it points, it does not prove"
)


def validation_view(outcome: Validation, screen: Screen, *, rows: bool = False) -> Sequence[RenderableType]:
    """Errors by kind, source and device, order, scaling, the worst rows, and the verdict; every row if asked."""
    return spaced(
        [
            _rows_table(outcome) if rows else None,
            _summaries("all rows", outcome.summaries("all"), screen),
            _summaries("by device", _unseen(outcome, "device"), screen),
            _summaries("by source, unseen", _unseen(outcome, "source"), screen),
            _order(outcome),
            _scaling(outcome),
            _worst(outcome, screen),
            _not_simulated(outcome),
            _verdict(outcome),
        ]
    )


def _unseen(outcome: Validation, by: str) -> list[Summary]:
    return [group for group in outcome.summaries(by) if group.use == "unseen"]


def _summaries(title: str, groups: Sequence[Summary], screen: Screen) -> RenderableType | None:
    if not groups:
        return None
    more = ("used as",) if title == "all rows" else ()
    heads = HEADS if screen.roomy else ("rows", "median", "p90", "bias")
    table = plain_table(title, "of", *more, *heads, left=("of", *more), whole=True)
    for group in groups:
        figures = dict(zip(HEADS, _figures(group), strict=True))
        cells = [group.use] if more else []
        table.add_row(group.name, KINDS[group.kind], *cells, *(figures[head] for head in heads))
    if not more:
        return table
    uses = {group.use for group in groups}
    return Group(table, *(indented(f"{use}: {USES[use]}", "dim") for use in USES if use in uses))


def _figures(group: Summary) -> tuple[str, ...]:
    if group.kind == "verdict":
        right = round(group.rows * (1 - group.mean))
        return (f"{group.rows}", f"{right} right", "", "", "")
    sizes = (percent(group.median), percent(group.mean), percent(group.p90))
    return (f"{group.rows}", *sizes, signed_percent(group.bias))


def _order(outcome: Validation) -> RenderableType | None:
    from ..twin.validation_sums import overview, rankings

    found = [item for item in rankings(outcome.rows) if item.use == "unseen"]
    if not found:
        return None
    regrets = [item.regret for item in found]
    return Text(
        f"order of layouts, in {len(found)} groups that differ in nothing else: Kendall's tau "
        f"{overview(found, 'tau'):.2f} in the median; the layout predicted best ran "
        f"{percent(overview(found, 'regret'))} behind the best measured in the median, {percent(max(regrets))} at worst"
    )


def _scaling(outcome: Validation) -> RenderableType | None:
    shown, more = _shown_scalings(outcome)
    if not shown:
        return None
    heads = ("batch", "devices", "measured", "predicted")
    table = plain_table("efficiency kept when devices grow", *heads, left=("batch",))
    for cells in shown:
        table.add_row(*cells)
    note = f"and {more} series of fewer devices" if more else ""
    return Group(table, indented(note, "dim")) if note else table


def _shown_scalings(outcome: Validation) -> tuple[list[tuple[str, ...]], int]:
    """The series with the most devices, as people read them, and how many more there are."""
    from ..twin.validation_sums import scalings

    found = sorted(scalings(outcome.rows), key=lambda item: -item.most)
    cells: list[tuple[str, ...]] = [
        (item.last, item.kind, f"{item.fewest:,} to {item.most:,}", percent(item.measured), percent(item.predicted))
        for item in found[:SHOWN_SCALINGS]
    ]
    return cells, len(found) - len(cells)


def _worst(outcome: Validation, screen: Screen) -> RenderableType | None:
    from ..twin.validation_sums import suspects

    found = suspects(outcome.rows)
    if not found:
        return None
    more = ("share", "usual") if screen.roomy else ()
    table = plain_table("farthest off in time", "used as", "error", "part", *more, left=("used as", "part"))
    for item in found:
        shares = (percent(item.share), percent(item.usual)) if item.part and more else ("",) * len(more)
        table.add_row(item.row.id, item.row.use, signed_percent(item.row.error), item.part.replace("_", " "), *shares)
    return Group(table, indented(SUSPECT_NOTE, "dim"))


def _not_simulated(outcome: Validation) -> RenderableType | None:
    if not outcome.unanswered:
        return None
    counts = Counter(item.series for item in outcome.unanswered)
    listed = ", ".join(f"{series} {count}" for series, count in counts.items())
    first = outcome.unanswered[0]
    return Text(f"not simulated: {len(outcome.unanswered)} runs ({listed}); {first.id}: {first.reason}"[:600], "yellow")


def _verdict(outcome: Validation) -> Text:
    faults = outcome.faults
    outside = [row for row in outcome.rows if not row.within]
    said = []
    if faults:
        said.append(f"{len(faults)} predictions failed, the first of {faults[0].id}: {faults[0].reason}")
    if outside:
        said.append(f"{len(outside)} of {len(outcome.rows)} rows lie outside their bound: {outside[0].id}, ...")
    said += [
        f"{item.series}: {item.figure} of {KINDS[item.kind]} is {percent(item.error)}, stated {percent(item.bound)}"
        for item in outcome.breaches
    ]
    if said:
        return Text("\n".join(said), style="bold red")
    return Text(f"all {len(outcome.rows)} rows keep to what is stated", style="bold green")


def _rows_table(outcome: Validation) -> RenderableType:
    table = plain_table(*ROW_HEADS, left=("source", "used as"))
    for row in outcome.rows:
        table.add_row(*row_cells(row), style=None if row.within else "bold red")
    return table


def row_cells(row: ValidationRow) -> tuple[str, ...]:
    """A row as people read it."""
    if row.kind == "verdict":
        words = {0.0: "out of memory", 1.0: "fits"}
        right = "wrong" if row.error else "right"
        return (row.id, row.series, row.use, words[row.measured], words[row.predicted], right, "")
    show = {"rate": format_flop_rate, "memory": format_bytes}.get(row.quantity, format_duration)
    bound = "" if row.bound is None else f"{row.bound * 100:.0f} %"
    figures = (show(row.measured), show(row.predicted), signed_percent(row.error))
    return (row.id, row.series, row.use, *figures, bound)


def validation_markdown(outcome: Validation, *, rows: bool = False) -> str:
    """The same as Markdown tables."""
    from ..twin.validation_sums import rankings, suspects

    lines: list[str] = []
    for title, groups in (
        ("all", outcome.summaries("all")),
        ("device", _unseen(outcome, "device")),
        ("source", _unseen(outcome, "source")),
    ):
        lines += _markdown_table((title, "of", "used as", *HEADS), 3, [_cells(group) for group in groups])
    order = [
        (item.group, str(item.rows), f"{item.tau:.2f}", percent(item.regret))
        for item in rankings(outcome.rows)
        if item.use == "unseen" and item.rows > SHOWN_GROUPS
    ]
    lines += _markdown_table(("layouts in order", "rows", "Kendall's tau", "best predicted behind best"), 1, order)
    lines += _markdown_table(
        ("efficiency kept", "batch", "devices", "measured", "predicted"), 2, _shown_scalings(outcome)[0]
    )
    worst = [
        (item.row.id, item.row.use, signed_percent(item.row.error), item.part.replace("_", " "))
        for item in suspects(outcome.rows, 20)
    ]
    lines += _markdown_table(("farthest off in time", "used as", "error", "part"), 2, worst)
    if rows:
        lines += _markdown_table(ROW_HEADS, 3, [row_cells(row) for row in outcome.rows])
    return "\n".join(lines).rstrip("\n") + "\n"


def _cells(group: Summary) -> tuple[str, ...]:
    return (group.name, KINDS[group.kind], group.use, *_figures(group))


def _markdown_table(heads: Sequence[str], left: int, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    rule = "|" + "---|" * left + "--:|" * (len(heads) - left)
    return [_line(heads), rule, *(_line(row) for row in rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
