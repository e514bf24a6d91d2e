"""An optimizer on the host, against hand counts of what it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exatwin.scenarios.framework import load_framework
from exatwin.scenarios.scenario import load_scenario
from exatwin.sim import host
from exatwin.sim.calibration import default_calibration
from exatwin.sim.costs import job_cost
from exatwin.sim.traffic import build_traffic
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine


def test_adam_on_the_host_is_bound_by_its_memory():
    """A billion parameters a GCD of Frontier: 2 GB down a link of 36 GB/s, 28 GB through an eighth of 204.8 GB/s."""
    node = load_machine("frontier").node
    seconds = host.offloaded_step_s(1e9, 2, 2, node)
    assert seconds == pytest.approx(2 / 36 + 28 / 25.6)
    assert host.offloaded_step_s(1e9, 2, 2, node, gradients_are_down=True) == pytest.approx(28 / 25.6)


def test_a_machine_that_says_nothing_of_its_host_is_an_error():
    with pytest.raises(InputError, match="host_link"):
        host.offloaded_step_s(1.0, 2, 2, load_machine("fugaku").node)


def test_gradients_that_are_reduced_beside_the_backward_go_down_beside_it():
    scenario = load_scenario("h100-llama-3-8b", ["layout={offload_optimizer: true}", "devices=8"])
    zero3, zero1 = (
        replace(
            scenario, framework=load_framework("deepspeed"), layout=scenario.layout.model_copy(update={"zero": zero})
        )
        for zero in (3, 1)
    )
    assert host.host_optimizer_s(zero3, 1e9) < host.host_optimizer_s(zero1, 1e9)


def test_offloading_trades_step_time_for_memory():
    seconds = []
    for offload in (False, True):
        scenario = load_scenario("frontier-22b", [f"layout.offload_optimizer={str(offload).lower()}"])
        calibration = default_calibration(scenario.machine)
        cost = job_cost(scenario, calibration, build_traffic(scenario, calibration))
        seconds.append(cost.stages[0].optimizer_s)
    assert seconds[1] > 5 * seconds[0]
