"""The fits behind the bundled calibrations, done again: ``make calibrate``."""

from __future__ import annotations

import sys

from rich.text import Text

from ..twin.calibrate import RECIPES, fit
from .terminal import open_console, plain_table
from .words import signed_percent


def main() -> None:
    """Fit every calibration and print its figures, what is left over, and what the others say of each row."""
    console = open_console(sys.stdout)
    for recipe in RECIPES:
        result = fit(recipe)
        figures = plain_table("figure", "fitted", whole=True)
        for paths, value in zip(recipe.figures, result.values, strict=True):
            figures.add_row(", ".join(path.removesuffix(".value") for path in paths), f"{value:.4g}")
        rows = plain_table("row", "predicted / measured - 1", "fitted without it", whole=True)
        for row, error in result.errors.items():
            left_out = signed_percent(result.left_out[row]) if result.left_out else ""
            rows.add_row(row, signed_percent(error), left_out)
        console.print(Text(recipe.calibration, style="bold"), figures, rows, "", sep="\n")


if __name__ == "__main__":
    main()
