"""Predictions beside every published measurement that is bundled.

Rows that a calibration was fitted on, rows that it never saw and rows of context
(other software, known outliers) are kept apart; accuracy is quoted on the unseen.
Every row has a bound, the error that docs/accuracy.md states for it, so that an
error that grows is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..scenarios.measurements import (
    MeasuredCollective,
    Use,
    measured_collectives,
    measured_run,
    measured_runs,
    measured_stage_memory,
)
from ..scenarios.result import Prediction
from ..scenarios.scenario import Scenario
from ..sim.communicate import collective_s
from ..sim.predict import choose_calibration, predict
from ..sim.traffic import placement_of

Quantity = Literal["step", "rate", "memory", "collective"]

# The error that each kind of row may have, relative. Rows of context have none.
BOUNDS: dict[Quantity, float] = {"step": 0.10, "rate": 0.10, "memory": 0.03, "collective": 0.05}
FUGAKU_BOUND = 0.05
# Rows that miss the bound of their kind, with the error that stands for them; docs/accuracy.md says why.
KNOWN_MISSES = {"frontier-dash-1t-weak-3072": 0.17}


@dataclass(frozen=True)
class ValidationRow:
    """One measured figure and its prediction.

    Attributes:
        id: The published row, with the stage or the message where it has several.
        quantity: ``step`` (s), ``rate`` (hardware FLOP/s of a device), ``memory`` (bytes) or ``collective`` (s).
        machine: Where it was measured.
        source: Key in docs/sources.md.
        use: ``fit``, ``unseen`` or ``context``.
        error: Predicted over measured, less one.
        bound: The error it may have; None where nothing is claimed.
        note: What the row's file says of it.
    """

    id: str
    quantity: Quantity
    machine: str
    source: str
    use: Use
    measured: float
    predicted: float
    error: float
    bound: float | None
    note: str

    @property
    def within(self) -> bool:
        """Whether the error keeps to its bound."""
        return self.bound is None or abs(self.error) <= self.bound


@dataclass(frozen=True)
class Summary:
    """Errors of one group of rows, relative."""

    quantity: Quantity
    use: Use
    rows: int
    median_absolute: float
    mean_absolute: float
    worst: float
    bias: float


@dataclass(frozen=True)
class Validation:
    """All rows, in the order of their files."""

    rows: tuple[ValidationRow, ...]

    @property
    def within(self) -> bool:
        """Whether every row keeps to its bound."""
        return all(row.within for row in self.rows)

    def summaries(self) -> tuple[Summary, ...]:
        """Errors by quantity and use."""
        groups: dict[tuple[Quantity, Use], list[float]] = {}
        for row in self.rows:
            groups.setdefault((row.quantity, row.use), []).append(row.error)
        return tuple(_summary(quantity, use, errors) for (quantity, use), errors in groups.items())

    def document(self, version: str) -> dict[str, Any]:
        """The JSON document of ``exatwin validate --json``."""
        return {
            "schema_version": 1,
            "within": self.within,
            "summaries": [dataclasses.asdict(summary) for summary in self.summaries()],
            "rows": [{**dataclasses.asdict(row), "within": row.within} for row in self.rows],
            "exatwin_version": version,
        }


def validate() -> Validation:
    """Predict everything that was measured."""
    predictions: dict[str, Prediction] = {}
    rows = [*_runs(predictions), *_stages(predictions), *_messages()]
    return Validation(tuple(rows))


def _predicted(predictions: dict[str, Prediction], run_id: str) -> Prediction:
    if run_id not in predictions:
        predictions[run_id] = predict(measured_run(run_id).ask())
    return predictions[run_id]


def _runs(predictions: dict[str, Prediction]) -> Iterable[ValidationRow]:
    for run in measured_runs():
        if not run.scenario or (run.step_s is None and run.tflops_hardware is None):
            continue
        prediction = _predicted(predictions, run.id)
        machine = prediction.scenario["machine"]
        # A rate that was printed is a measurement; a step time derived from it is the same one again.
        if run.step_s is not None and run.id not in _RATE_ROWS:
            pair: tuple[Quantity, float, float] = ("step", run.step_s, prediction.step_s)
        elif run.tflops_hardware is not None:
            pair = ("rate", run.tflops_hardware * 1e12, prediction.tflops_per_device.hardware)
        else:
            continue
        yield _row(run.id, *pair, machine=machine, source=run.source, use=run.use, note=run.note)


# Rows whose source prints a rate and no step time.
_RATE_ROWS = {"frontier-dash-175b-weak-1024", "frontier-dash-1t-weak-3072"}


def _stages(predictions: dict[str, Prediction]) -> Iterable[ValidationRow]:
    for stage in measured_stage_memory():
        prediction = _predicted(predictions, stage.run)
        yield _row(
            f"{stage.run} stage {stage.stage}",
            "memory",
            stage.max_allocated_bytes,
            prediction.memory.stages[stage.stage].peak_bytes,
            machine=prediction.scenario["machine"],
            source=stage.source,
            use=stage.use,
            note=stage.note,
        )


def _messages() -> Iterable[ValidationRow]:
    for message in measured_collectives():
        if message.use == "context":
            continue
        scenario = message.ask()
        size = message.size_bytes
        note = f"{message.op}, {message.group}, {message.ranks} ranks, {size:.0f} B. {message.note}"
        yield _row(
            message.id,
            "collective",
            message.median_s,
            _message_s(message, scenario),
            machine=scenario.machine.name,
            source=message.source,
            use=message.use,
            note=note,
        )


def _message_s(message: MeasuredCollective, scenario: Scenario) -> float:
    """Seconds of one timed message while the groups like its own run theirs."""
    placement = placement_of(scenario)
    grid = placement.grid()
    groups = {
        "tp": placement.tensor_groups()[:1],
        "pp": np.stack([grid[0].reshape(-1), grid[1].reshape(-1)], axis=1),
        "dp": grid[0].T,
        "embedding": np.stack([grid[0].reshape(-1), grid[-1].reshape(-1)], axis=1),
    }[message.group]
    op = "send" if message.group == "pp" else message.op
    size = message.size_bytes * (groups.shape[1] if op == "all_gather" else 1)
    figures = choose_calibration(scenario).network
    return collective_s(op, size, groups, placement.routes(scenario.machine), figures).seconds


def _row(
    name: str, quantity: Quantity, measured: float, predicted: float, *, machine: str, source: str, use: Use, note: str
) -> ValidationRow:
    bound: float | None = None
    if use != "context":
        kind = FUGAKU_BOUND if machine == "fugaku" else BOUNDS[quantity]
        bound = KNOWN_MISSES.get(name, kind)
    error = predicted / measured - 1
    return ValidationRow(name, quantity, machine, source, use, measured, predicted, error, bound, note)


def _summary(quantity: Quantity, use: Use, errors: Sequence[float]) -> Summary:
    sizes = sorted(abs(error) for error in errors)
    middle = len(sizes) // 2
    median = sizes[middle] if len(sizes) % 2 else (sizes[middle - 1] + sizes[middle]) / 2
    return Summary(
        quantity=quantity,
        use=use,
        rows=len(errors),
        median_absolute=median,
        mean_absolute=sum(sizes) / len(sizes),
        worst=max(errors, key=abs),
        bias=sum(errors) / len(errors),
    )
