"""Published steps, within the error stated beside each row, so that an error that grows fails."""

from __future__ import annotations

import pytest

from exatwin.scenarios.measurements import measured_collectives, measured_run, measured_runs
from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.calibration import default_calibration
from exatwin.sim.predict import predict
from exatwin.sim.traffic import build_traffic, ring_s

# Row: largest relative error of the step, and of the hardware rate where the source prints one.
WITHIN = {
    "lumi-175b-128gcd": 0.015,
    "lumi-7b-32gcd": 0.015,
    "lumi-175b-256gcd": 0.01,
    "lumi-175b-2048gcd": 0.06,
    "lumi-33b-64gcd": 0.05,
    "frontier-ornl22b-16gcd-001": 0.01,
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


# Medians of the calls inside the runs of 16 to 256 nodes: rings of 2 to 32 nodes, messages, and rings inside a node.
COLLECTIVE_WITHIN = 0.05
COLLECTIVES = [row for row in measured_collectives() if row.use in ("fit", "unseen")]


@pytest.mark.parametrize("row", COLLECTIVES, ids=[row.id for row in COLLECTIVES])
def test_a_published_collective_is_met_within_its_stated_error(row):
    scenario = load_scenario("lumi-175b", [f"devices={8 * row.nodes}"])
    traffic = build_traffic(scenario, default_calibration(scenario.machine))
    size = row.size_bytes * (row.ranks if row.op == "all_gather" else 1)
    seconds = {
        "tp": lambda: ring_s(row.op, size, row.ranks, traffic.tensor_rate, traffic.tensor_ring),
        "dp": lambda: ring_s(row.op, size, row.ranks, traffic.data_rate(0), traffic.data_ring),
        "embedding": lambda: ring_s(row.op, size, row.ranks, traffic.embedding_rate, traffic.embedding_ring),
        "pp": lambda: size / traffic.message_rate(0) + traffic.message_latency_s[0],
    }[row.group]()
    assert seconds == pytest.approx(row.median_s, rel=COLLECTIVE_WITHIN)
