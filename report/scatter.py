"""Measured against predicted as a picture: a page with its own SVG, or a PNG through matplotlib."""

from __future__ import annotations

import csv
import dataclasses
import html
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..topology.errors import input_error
from ..topology.units import format_bytes, format_duration
from .documents import drafted, write_text
from .words import signed_percent

if TYPE_CHECKING:
    from ..twin.validate import Validation
    from ..twin.validation_rows import ValidationRow

COLOURS = (  # Paul Tol, bright and muted
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000"),
    *("#332288", "#44aa99", "#999933", "#882255", "#ddcc77", "#117733"),
)
ASIDE = "#aaaaaa"  # rows of which nothing is claimed
OTHER_FORMATS = (".pdf", ".svg", ".jpg", ".jpeg", ".htm", ".gif", ".webp", ".tsv", ".xlsx", ".parquet", ".md")
SIDE, MARGIN = 560.0, 70.0  # of one plot, in SVG units
ROW_FIELDS = ("id", "quantity", "series", "source", "machine", "device", "devices", "use", "group")


def saver(path: str) -> Callable[[Validation], None] | None:
    """How a validation is written to a file of that name; None for a JSON document.

    Raises:
        InputError: If its ending asks for a picture or a table of another format.
    """
    by_suffix = {".html": save_html, ".png": save_png, ".csv": save_csv}
    ending = Path(path).suffix.lower()
    if ending in OTHER_FORMATS:
        known = ", ".join(by_suffix)
        raise input_error(f"is not written as {ending}; give a name that ends in {known} or .json", where=path)
    make = by_suffix.get(ending)
    return None if make is None else make(path)


def save_csv(path: str) -> Callable[[Validation], None]:
    """Every row, with its figures in SI units."""

    def save(outcome: Validation) -> None:
        heads = [*ROW_FIELDS, "measured", "predicted", "error", "bound", "note"]
        with drafted(path) as place, place.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(heads)
            for row in outcome.rows:
                fields = dataclasses.asdict(row)
                writer.writerow(["" if fields[head] is None else fields[head] for head in heads])

    return save


def save_html(path: str) -> Callable[[Validation], None]:
    """A page that needs nothing else: a plot of times, one of memory, with each row's name under the pointer."""

    def save(outcome: Validation) -> None:
        plots = [_svg(title, rows, show) for title, rows, show in _plots(outcome)]
        page = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>exatwin: measured and predicted</title>'
            "<style>body{font:15px system-ui,sans-serif;margin:2em}svg{max-width:46em;height:auto}</style>"
            f"<h1>Measured and predicted</h1>{''.join(plots)}</html>\n"
        )
        write_text(page, path)

    return save


def save_png(path: str) -> Callable[[Validation], None]:
    """The same plots through matplotlib.

    Raises:
        InputError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        message = "needs matplotlib for a picture (pip install 'exatwin[plot]'); a page needs nothing: write to .html"
        raise input_error(message, field="output") from None

    def save(outcome: Validation) -> None:
        plots = _plots(outcome)
        figure: Any = Figure(figsize=(6 * len(plots), 6), layout="constrained")
        for column, (title, rows, _) in enumerate(plots, 1):
            axes = figure.add_subplot(1, len(plots), column)
            low, high = _range(rows)
            axes.plot([low, high], [low, high], color="#888888", linewidth=1)
            for colour, (device, members) in zip(_endless(), _by_device(rows).items(), strict=False):
                for filled, part in ((True, _used(members, fit=False)), (False, _used(members, fit=True))):
                    axes.scatter(
                        [row.measured for row in part],
                        [row.predicted for row in part],
                        s=10,
                        label=device if filled else None,
                        facecolors=colour if filled else "none",
                        edgecolors=colour,
                    )
            aside = [row for row in rows if row.use == "context"]
            if aside:
                measured, predicted = zip(*((row.measured, row.predicted) for row in aside), strict=True)
                axes.scatter(measured, predicted, s=12, marker="x", linewidths=0.7, color=ASIDE, label="context")
            axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", title=title)
            axes.legend(fontsize="small")
        with drafted(path) as place:
            figure.savefig(place, dpi=150)

    return save


Plot = tuple[str, "list[ValidationRow]", Callable[[float], str]]


def _plots(outcome: Validation) -> list[Plot]:
    steps = [row for row in outcome.rows if row.quantity == "step"]
    memory = [row for row in outcome.rows if row.quantity == "memory"]
    plots: list[Plot] = [("step time", steps, format_duration), ("memory of a device", memory, format_bytes)]
    return [plot for plot in plots if plot[1]]


def _svg(title: str, rows: Sequence[ValidationRow], show: Callable[[float], str]) -> str:
    low, high = _range(rows)
    span = math.log(high / low)

    def place(value: float) -> float:
        return SIDE * math.log(value / low) / span

    parts = [f'<rect x="0" y="0" width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/>']
    parts.append(f'<line x1="0" y1="{SIDE}" x2="{SIDE}" y2="0" stroke="#999"/>')
    for tick in _ticks(low, high):
        at, text = place(tick), html.escape(show(tick))
        parts.append(f'<text x="{at:.1f}" y="{SIDE + 18}" font-size="11" text-anchor="middle">{text}</text>')
        parts.append(f'<text x="-6" y="{SIDE - at + 4:.1f}" font-size="11" text-anchor="end">{text}</text>')
    legend = 14.0
    for colour, (device, members) in zip(_endless(), _by_device(rows).items(), strict=False):
        parts.append(f'<circle cx="12" cy="{legend}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="22" y="{legend + 4}" font-size="12">{html.escape(device)}</text>')
        legend += 17
        for row in members:
            edge = ASIDE if row.use == "context" else colour
            fill = colour if row.use == "unseen" else "none"
            words = f"{row.id}: measured {show(row.measured)}, predicted {show(row.predicted)}, "
            hint = html.escape(f"{words}{signed_percent(row.error)}, {row.use}")
            x, y = place(row.measured), SIDE - place(row.predicted)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{fill}" stroke="{edge}" fill-opacity="0.6">'
                f"<title>{hint}</title></circle>"
            )
    size = SIDE + 2 * MARGIN
    return (
        f"<h2>{html.escape(title)}, {len(rows)} rows</h2>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} {-MARGIN / 2} {size} {size}">'
        f"{''.join(parts)}"
        f'<text x="{SIDE / 2}" y="{SIDE + 42}" text-anchor="middle">'
        "measured (rings: rows that a fit saw; grey rings: context)</text>"
        f'<text x="0" y="-8">predicted</text></svg>'
    )


def _range(rows: Sequence[ValidationRow]) -> tuple[float, float]:
    values = [value for row in rows for value in (row.measured, row.predicted)]
    return min(values) / 1.2, max(values) * 1.2


def _ticks(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**power for power in range(first, last + 1)] or [math.sqrt(low * high)]


def _by_device(rows: Sequence[ValidationRow]) -> dict[str, list[ValidationRow]]:
    groups: dict[str, list[ValidationRow]] = {}
    for row in rows:
        groups.setdefault(row.device, []).append(row)
    return groups


def _used(rows: Sequence[ValidationRow], *, fit: bool) -> list[ValidationRow]:
    return [row for row in rows if row.use == ("fit" if fit else "unseen")]


def _endless() -> Iterator[str]:
    return cycle(COLOURS)
