"""The fits behind the bundled calibrations, done again: ``make calibrate``."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import yaml
from rich.text import Text

from ..sim.fits import FOLDER
from ..twin.calibrate import RECIPES, FitResult, Recipe, fit
from .terminal import open_console, plain_table
from .words import signed_percent

HEAD = "# Written by `make calibrate`; twin/calibrate.py says which figures are free and which rows the fit saw.\n"


def main(arguments: list[str] | None = None) -> None:
    """Fit every calibration named, or all, and print its figures, what is left over, and what others say of each row.

    Args:
        arguments: Names of calibrations; ``--write`` puts the figures into ``sim/fits/``.
    """
    given = sys.argv[1:] if arguments is None else arguments
    names = [word for word in given if not word.startswith("-")]
    recipes = [recipe for recipe in RECIPES if not names or recipe.calibration in names]
    console = open_console(sys.stdout)
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(fit, recipes))
    for recipe, result in zip(recipes, results, strict=True):
        console.print(Text(recipe.calibration, style="bold"), *_tables(recipe, result), "", sep="\n")
        if "--write" in given:  # once all are made: a fit reads the files of the others
            file = Path(__file__).parents[1] / "sim" / FOLDER / f"{recipe.calibration}.yaml"
            file.write_text(HEAD + yaml.safe_dump(result.document(), sort_keys=False, width=120), encoding="utf-8")


def _tables(recipe: Recipe, result: FitResult) -> tuple[object, object]:
    figures = plain_table("figure", "fitted", whole=True)
    for figure, value in zip(recipe.figures, result.values, strict=True):
        figures.add_row(figure.path, str(figure.told(value)))
    rows = plain_table("row", "predicted / measured - 1", "fitted without it", whole=True)
    for row, error in result.errors.items():
        left_out = signed_percent(result.left_out[row]) if result.left_out else ""
        rows.add_row(row, signed_percent(error), left_out)
    return figures, rows


if __name__ == "__main__":
    main()
