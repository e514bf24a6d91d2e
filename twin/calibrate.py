"""Fitting the few figures of a calibration that only whole runs can tell.

A recipe names a calibration and the figures that are free. The rows are those that a rule
chose before anything was fitted: marked ``fit`` among the runs of Frontier, LUMI-G and Fugaku
(`scenarios.measurements`), and by `scenarios.published.fit_rows` elsewhere. The layout is read
from the run, never fitted. Everything else in the calibration stays as it is; what is found
goes to ``sim/fits/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..scenarios.measurements import measured_runs
from ..scenarios.published import published_runs
from ..scenarios.scenario import Scenario, scenario_from_document
from ..sim.calibration import Calibration, calibration_with
from ..sim.predict import choose_calibration, predict
from ..topology.errors import input_error

TOLERANCE = 0.05
"""Relative error beyond which a row pulls less: published rows hold some that no model of their layout explains."""

FOLDS = 4
"""Parts into which the rows of a large fit are cut to predict each row without it."""


@dataclass(frozen=True)
class Figure:
    """A free figure of a calibration.

    Attributes:
        path: Where it stands, such as ``step.dispatch``.
        least: Its bounds: least,
        most: and most.
        start: Where the fit begins.
        unit: Of a figure with one, such as ``s``.
    """

    path: str
    least: float
    most: float
    start: float
    unit: str = ""

    def told(self, value: float) -> float | str:
        """A value of it as a calibration file says it."""
        return f"{value:.6g} {self.unit}" if self.unit else float(f"{value:.6g}")


SUSTAINED = Figure("compute.sustained", 0.2, 1.0, 0.9)
ELEMENTWISE = Figure("compute.memory_fraction", 0.2, 1.0, 0.7)
DISPATCH = Figure("step.dispatch", 0.0, 500.0, 30.0, "us")
EXPERTS = Figure("step.expert_pass", 0.0, 20.0, 5.0, "ms")
FABRIC = Figure("network.fabric_ring", 0.03, 1.0, 0.6)


@dataclass(frozen=True)
class Recipe:
    """A calibration and its free figures."""

    calibration: str
    figures: tuple[Figure, ...]


RECIPES = (
    Recipe("mi250x-rccl", (SUSTAINED,)),
    Recipe(
        "a64fx-tofud",
        (
            Figure("compute.gemm_fraction.fp32", 0.01, 1.0, 0.3),
            Figure("step.hop_overhead", 0.0, 10.0, 1.0, "s"),
        ),
    ),
    Recipe("a100-vtrain", (ELEMENTWISE, DISPATCH)),
    Recipe("a100-nccl", (ELEMENTWISE,)),
    Recipe("a100-opa", (SUSTAINED, FABRIC)),
    Recipe("a100-mosaic", (SUSTAINED, ELEMENTWISE)),
    Recipe("a100-40-mosaic", (SUSTAINED, ELEMENTWISE)),
    Recipe("h100-mosaic", (SUSTAINED, ELEMENTWISE)),
    Recipe("h100-nccl", (SUSTAINED, EXPERTS)),
    Recipe("h100-efa", (SUSTAINED, FABRIC)),
    Recipe("gh200-slingshot", (ELEMENTWISE,)),
    Recipe("b200-simumax", (SUSTAINED,)),
    Recipe("v100-opa", (SUSTAINED,)),
    Recipe("max1550-occl", (SUSTAINED,)),
)


@dataclass(frozen=True)
class FitRow:
    """A run that a fit sees."""

    id: str
    scenario: Scenario
    step_s: float


@dataclass(frozen=True)
class FitResult:
    """What a fit found.

    Attributes:
        recipe: What was asked.
        values: The fitted figures, in the recipe's order.
        errors: Of each row, predicted over measured less one.
        left_out: The same for each row, fitted without it: on all others of a small fit, on other
            `FOLDS` of a large one; None where too few are left.
    """

    recipe: Recipe
    values: tuple[float, ...]
    errors: dict[str, float]
    left_out: dict[str, float] | None

    def document(self) -> dict[str, object]:
        """What the file of the fit says."""
        figures = zip(self.recipe.figures, self.values, strict=True)
        return {
            "calibration": self.recipe.calibration,
            "command": "exatwin-fit, make calibrate",
            "figures": {figure.path: figure.told(value) for figure, value in figures},
            "residuals": [{"row": row, "error": round(error, 4)} for row, error in self.errors.items()],
        }


def fit_rows_of(calibration: str) -> Iterator[FitRow]:
    """The rows that a fit of a calibration sees."""
    for run in measured_runs():
        if run.use == "fit" and run.step_s is not None and run.scenario:
            scenario = run.ask()
            if choose_calibration(scenario).name == calibration:
                yield FitRow(run.id, scenario, run.step_s)
    for row in published_runs():
        if row.use == "fit" and row.step_s is not None:
            scenario = scenario_from_document(row.fields, row.id)
            if choose_calibration(scenario).name == calibration:
                yield FitRow(row.id, scenario, row.step_s)


def fit(recipe: Recipe) -> FitResult:
    """Fit a calibration on its rows, relative errors weighing alike, rows that nothing explains less.

    Raises:
        InputError: If no row is marked for it.
    """
    rows = list(fit_rows_of(recipe.calibration))
    if not rows:
        raise input_error("no published row is marked for a fit of it", where=recipe.calibration)
    values = _solve(recipe, rows)
    errors = dict(zip((row.id for row in rows), _errors(with_figures(recipe, values), rows), strict=True))
    left_out: dict[str, float] | None = None
    folds = len(rows) if len(rows) <= 2 * FOLDS else FOLDS
    if len(rows) - -(-len(rows) // folds) >= len(recipe.figures):
        left_out = {}
        for fold in range(folds):
            out = rows[fold::folds]
            others = [row for row in rows if row not in out]
            trial = with_figures(recipe, _solve(recipe, others, values))
            left_out |= dict(zip((row.id for row in out), _errors(trial, out), strict=True))
    return FitResult(recipe, values, errors, left_out)


def with_figures(recipe: Recipe, values: Sequence[float]) -> Calibration:
    """The calibration with other values in the recipe's figures."""
    figures = {figure.path: figure.told(value) for figure, value in zip(recipe.figures, values, strict=True)}
    return calibration_with(recipe.calibration, figures)


def _errors(calibration: Calibration, rows: Sequence[FitRow]) -> list[float]:
    return [predict(row.scenario, calibration, "recurrence").step_s / row.step_s - 1 for row in rows]


def _solve(recipe: Recipe, rows: Sequence[FitRow], start: Sequence[float] | None = None) -> tuple[float, ...]:
    from scipy.optimize import least_squares

    scale = [figure.start for figure in recipe.figures]
    lower = [figure.least / figure.start for figure in recipe.figures]
    upper = [figure.most / figure.start for figure in recipe.figures]
    begin = [1.0] * len(scale) if start is None else [value / s for value, s in zip(start, scale, strict=True)]
    begin = [min(max(x, a), b) for x, a, b in zip(begin, lower, upper, strict=True)]

    def residuals(scaled: Sequence[float]) -> list[float]:
        calibration = with_figures(recipe, [s * x for s, x in zip(scale, scaled, strict=True)])
        return [math.log1p(error) for error in _errors(calibration, rows)]

    # Predictions jump where a library changes its algorithm, so differences are taken over a hundredth.
    solution = least_squares(
        residuals, begin, bounds=(lower, upper), loss="soft_l1", f_scale=TOLERANCE, diff_step=1e-2, xtol=1e-5, ftol=1e-6
    )
    return tuple(float(s * x) for s, x in zip(scale, solution.x, strict=True))
