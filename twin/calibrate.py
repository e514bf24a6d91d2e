"""Fitting the few figures of a calibration that only whole runs can tell.

A recipe names a calibration, the figures that are free, and the rule by which
published rows were chosen before anything was fitted: those marked ``fit`` in
``scenarios/validation``. The layout is read from the run, never fitted. Everything
else in the calibration stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..scenarios.measurements import MeasuredRun, measured_runs
from ..scenarios.scenario import Scenario
from ..sim.calibration import Calibration, load_calibration
from ..sim.predict import predict
from ..topology.errors import input_error


@dataclass(frozen=True)
class Recipe:
    """Which figures of a calibration are fitted, and within which bounds.

    Attributes:
        calibration: Its bundled name.
        figures: Dotted paths into the calibration, several for one free figure where they share it.
        bounds: Least and most of each.
    """

    calibration: str
    figures: tuple[tuple[str, ...], ...]
    bounds: tuple[tuple[float, float], ...]


RECIPES = (
    Recipe(
        "mi250x-rccl",
        (("compute.gemm_fraction.fp16.value", "compute.gemm_fraction.bf16.value"),),
        ((0.05, 1.0),),
    ),
    Recipe(
        "a64fx-tofud",
        (("compute.gemm_fraction.fp32.value",), ("step.hop_overhead.value",)),
        ((0.01, 1.0), (0.0, 10.0)),
    ),
)


@dataclass(frozen=True)
class FitResult:
    """What a fit found.

    Attributes:
        calibration: The calibration with the fitted figures in it.
        values: The fitted figures, in the recipe's order.
        errors: Of each row, predicted over measured less one.
        left_out: The same for each row, fitted on the others; None where too few are left.
    """

    calibration: Calibration
    values: tuple[float, ...]
    errors: dict[str, float]
    left_out: dict[str, float] | None


def fit(recipe: Recipe) -> FitResult:
    """Fit a calibration on the rows marked for it, relative errors weighing alike.

    Raises:
        InputError: If no row is marked for its machines.
    """
    base = load_calibration(recipe.calibration)
    rows = [
        (run, scenario)
        for run in measured_runs()
        if run.use == "fit" and run.step_s is not None
        for scenario in [run.ask()]
        if scenario.machine.name in base.machines
    ]
    if not rows:
        raise input_error(f"no published row is marked fit for {', '.join(base.machines)}", where=recipe.calibration)
    values = _solve(recipe, base, rows)
    fitted = with_figures(base, recipe, values)
    errors = {run.id: error for (run, _), error in zip(rows, _errors(fitted, rows), strict=True)}
    left_out = None
    if len(rows) - 1 >= len(recipe.figures):
        left_out = {}
        for index, row in enumerate(rows):
            others = rows[:index] + rows[index + 1 :]
            trial = with_figures(base, recipe, _solve(recipe, base, others))
            left_out[row[0].id] = _errors(trial, [row])[0]
    return FitResult(fitted, values, errors, left_out)


def with_figures(calibration: Calibration, recipe: Recipe, values: Sequence[float]) -> Calibration:
    """The calibration with other values in the recipe's figures."""
    for paths, value in zip(recipe.figures, values, strict=True):
        for path in paths:
            calibration = _replaced(calibration, path.split("."), value)
    return calibration


def _replaced(place: Any, path: list[str], value: float) -> Any:
    head, *rest = path
    new = _replaced(place[head] if isinstance(place, dict) else getattr(place, head), rest, value) if rest else value
    return {**place, head: new} if isinstance(place, dict) else place.model_copy(update={head: new})


Row = tuple[MeasuredRun, Scenario]


def _errors(calibration: Calibration, rows: Sequence[Row]) -> list[float]:
    return [predict(scenario, calibration, "recurrence").step_s / run.step_s - 1 for run, scenario in rows]


def _solve(recipe: Recipe, base: Calibration, rows: Sequence[Row]) -> tuple[float, ...]:
    from scipy.optimize import least_squares

    lower, upper = zip(*recipe.bounds, strict=True)
    start = [_value(base, paths[0]) for paths in recipe.figures]

    def residuals(scaled: Sequence[float]) -> list[float]:
        return _errors(with_figures(base, recipe, [s * x for s, x in zip(start, scaled, strict=True)]), rows)

    bounds = ([a / s for a, s in zip(lower, start, strict=True)], [b / s for b, s in zip(upper, start, strict=True)])
    solution = least_squares(residuals, [1.0] * len(start), bounds=bounds, xtol=1e-9, ftol=1e-9, diff_step=1e-4)
    return tuple(float(s * x) for s, x in zip(start, solution.x, strict=True))


def _value(calibration: Calibration, path: str) -> float:
    place: Any = calibration
    for part in path.split("."):
        place = place[part] if isinstance(place, dict) else getattr(place, part)
    return float(place)
