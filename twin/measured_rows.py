"""Rows of the runs of Frontier, LUMI-G and Fugaku: steps, rates, memory by stage, timed messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..scenarios.measurements import (
    MeasuredCollective,
    measured_collectives,
    measured_run,
    measured_stage_memory,
)
from ..scenarios.scenario import Scenario
from ..sim.communicate import collective_s
from ..sim.predict import choose_calibration, predict
from ..sim.traffic import placement_of
from .validation_rows import ValidationRow, common_fields, figure_row, verdict_row

# Rows whose source prints a rate and no step time: a step time derived from it is the same measurement again.
_RATE_ROWS = frozenset({"frontier-dash-175b-weak-1024", "frontier-dash-1t-weak-3072"})


def rows_of_measured_run(run_id: str) -> Iterator[ValidationRow]:
    """Step or rate of a run, the memory of its stages, and that it fits."""
    run = measured_run(run_id)
    scenario = run.ask()
    prediction = predict(scenario)
    common = common_fields(scenario, prediction) | {"series": run.source, "source": run.source}
    timed = common | {"id": run.id, "use": run.use, "note": run.note}
    if run.step_s is not None and run.id not in _RATE_ROWS:
        yield figure_row(timed, "step", run.step_s, prediction.step_s)
    elif run.tflops_hardware is not None:
        yield figure_row(timed, "rate", run.tflops_hardware * 1e12, prediction.tflops_per_device.hardware)
    for stage in measured_stage_memory():
        if stage.run == run.id:
            fields = common | {"id": f"{run.id} stage {stage.stage}", "use": stage.use, "note": stage.note}
            predicted = prediction.memory.stages[stage.stage].peak_bytes
            yield figure_row(fields | {"source": stage.source}, "memory", stage.max_allocated_bytes, predicted)
    if run.step_s is not None:
        yield verdict_row(timed, prediction, ran=True)


def message_row(message_id: str) -> ValidationRow:
    """One kind of message, timed inside a run."""
    message = next(item for item in measured_collectives() if item.id == message_id)
    scenario = message.ask()
    size = message.size_bytes
    predicted = _message_s(message, scenario)
    return ValidationRow(
        id=message.id,
        quantity="collective",
        series=message.source,
        source=message.source,
        machine=scenario.machine.name,
        device=scenario.machine.device.name,
        devices=scenario.devices,
        use=message.use,
        measured=message.median_s,
        predicted=predicted,
        error=predicted / message.median_s - 1,
        note=f"{message.op}, {message.group}, {message.ranks} ranks, {size:.0f} B. {message.note}",
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
