"""Writes the tables of docs/accuracy.md and the bounds that they state: ``make accuracy``.

All rows take minutes, so the page's tables are written here and not compared by the tests of the pages; what the tests
hold against the stated bounds is the fast subset.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..twin.bounds import bounds_text
from ..twin.validate import validate
from .progress import progress_on
from .validation import validation_markdown

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- written by make accuracy -->\n).*?(<!-- end -->)", re.DOTALL)
SERIES = re.compile(r"^series:.*?(?=^# The error that each)", re.DOTALL | re.MULTILINE)


def with_tables(page: str, tables: str) -> str:
    """The page with its tables replaced.

    >>> with_tables("<!-- written by make accuracy -->\\nold\\n<!-- end -->", "new\\n")
    '<!-- written by make accuracy -->\\nnew\\n<!-- end -->'
    """
    return BLOCK.sub(lambda found: f"{found[1]}{tables}{found[2]}", page)


def with_series(bounds: str, series: str) -> str:
    """The file of bounds with those of the series replaced."""
    return SERIES.sub(lambda _: series, bounds)


def main() -> None:
    """Predict everything, and write both files."""
    with progress_on(sys.stderr, "predicting published runs") as progress:
        outcome = validate(progress=progress)
    page, bounds = ROOT / "docs" / "accuracy.md", ROOT / "scenarios" / "validation" / "bounds.yaml"
    page.write_text(with_tables(page.read_text(encoding="utf-8"), validation_markdown(outcome)), encoding="utf-8")
    text = bounds_text(outcome.rows)
    bounds.write_text(with_series(bounds.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(f"{len(outcome.rows)} rows, {len(outcome.unanswered)} runs not simulated", file=sys.stderr)


if __name__ == "__main__":
    main()
