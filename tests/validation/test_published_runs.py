"""Published steps, within the error stated beside each row, so that an error that grows fails."""

from __future__ import annotations

import pytest

from exatwin.scenarios.measurements import measured_run, measured_runs
from exatwin.sim.predict import predict
from exatwin.twin.bounds import bounded
from exatwin.twin.validate import all_tasks, validate
from exatwin.twin.validation_tasks import answer_tasks

# Row: largest relative error of the step, and of the hardware rate where the source prints one.
WITHIN = {
    "lumi-175b-128gcd": 0.025,
    "lumi-7b-32gcd": 0.025,
    "lumi-175b-256gcd": 0.02,
    "lumi-175b-2048gcd": 0.06,
    "lumi-33b-64gcd": 0.05,
    "frontier-ornl22b-16gcd-001": 0.055,
    "frontier-dash-175b-weak-1024": 0.04,
    # Predicted 16 % too fast. The run's batch and layout are as reported, not read; docs/accuracy.md tells more.
    "frontier-dash-1t-weak-3072": 0.17,
    "fugaku-30b-077": 0.05,
    "fugaku-30b-082": 0.005,
    "fugaku-30b-083": 0.03,
    "fugaku-30b-084": 0.015,
    "fugaku-30b-085": 0.02,
    "fugaku-30b-086": 0.005,
    "fugaku-30b-087": 0.015,
}
USED = [run for run in measured_runs() if run.use in ("fit", "unseen")]


def test_every_row_that_accuracy_is_quoted_on_has_a_bound_and_no_bound_is_loose():
    assert set(WITHIN) == {run.id for run in USED}
    goal = {name: 0.05 if name.startswith("fugaku") else 0.10 for name in WITHIN}
    missed = {name for name, within in WITHIN.items() if within > goal[name]}
    assert missed == {"frontier-dash-1t-weak-3072"}


@pytest.mark.parametrize("run", USED, ids=[run.id for run in USED])
def test_a_published_step_is_met_within_its_stated_error(run):
    answer = predict(run.ask())
    assert run.step_s or run.tflops_hardware
    if run.step_s:
        assert answer.step_s == pytest.approx(run.step_s, rel=WITHIN[run.id])
    if run.tflops_hardware:
        rate = answer.tflops_per_device.hardware / 1e12
        assert rate == pytest.approx(run.tflops_hardware, rel=WITHIN[run.id])


def test_more_replicas_of_the_same_batch_lose_what_the_published_runs_lost():
    """From 128 to 2,048 GCDs the 175B run keeps 60 % of its rate, since its replicas run out of micro-batches."""
    rates = [measured_run(f"lumi-175b-{n}gcd").tflops_hardware for n in (128, 2048)]
    runs = [measured_run(f"lumi-175b-{n}gcd").ask() for n in (128, 2048)]
    predicted = [predict(run).tflops_per_device.hardware for run in runs]
    assert predicted[1] / predicted[0] == pytest.approx(rates[1] / rates[0], rel=0.08)


def test_the_fast_rows_of_every_series_keep_to_what_is_stated():
    """A few published runs of each source, the memory of stages, and messages timed inside runs of 16 to 256 nodes."""
    validation = validate(fast=True, jobs=1)
    assert {row.quantity for row in validation.rows} >= {"step", "memory", "verdict", "collective"}
    assert [row.id for row in validation.rows if not row.within] == []
    assert [item.reason for item in validation.faults] == []


def test_every_row_of_the_first_machines_keeps_to_its_bound():
    """All of Frontier, LUMI-G and Fugaku that a fit saw or accuracy is quoted on."""
    tasks = [task for task in all_tasks() if task.kind != "public"]
    rows = [bounded(row) for row in answer_tasks(tasks, jobs=1)]
    assert [row.id for row in rows if not row.within] == []
    quoted = [row for row in rows if row.use != "context" and row.kind != "verdict"]
    assert all(row.bound is not None for row in quoted)
