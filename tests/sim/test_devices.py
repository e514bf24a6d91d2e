"""Device files: figures that stand once, and calibrations that take them or say otherwise."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from exatwin.scenarios.scenario import scenario_from_document
from exatwin.sim.calibration import calibration_names, default_calibration, load_calibration
from exatwin.sim.devices import device_figures, device_names, with_device
from exatwin.sim.predict import predict
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine, machine_names


def figure(value):
    return {"value": value, "source": "assumed", "note": "A test."}


def document(folder, name):
    return yaml.safe_load((resources.files("exatwin.sim") / folder / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", device_names())
def test_a_device_file_is_called_as_its_device_and_some_calibration_takes_it(name):
    file = document("devices", name)
    assert file["name"] == name
    users = []
    for calibration in calibration_names():
        compute = document("calibrations", calibration)["compute"]
        if (compute if isinstance(compute, str) else compute.get("device")) == name:
            users.append(calibration)
            assert load_calibration(calibration).device in file["devices"]
    assert users


def test_a_calibration_may_say_otherwise_of_one_figure():
    base = device_figures("h100")
    own = with_device({"compute": {"device": "h100", "gemm_fraction": {"bf16": figure(0.7)}}}, "mine")["compute"]
    assert own["gemm_fraction"]["bf16"] == figure(0.7)
    assert own["gemm_fraction"]["fp8"] == base["gemm_fraction"]["fp8"]
    assert own["gemm_tile"] == base["gemm_tile"]


def test_a_figure_is_replaced_whole():
    """The source of the old figure does not stay beside the new value."""
    own = with_device({"compute": {"device": "a100", "launch": {"value": "1 us", "source": "mine"}}}, "mine")
    assert own["compute"]["launch"] == {"value": "1 us", "source": "mine"}


def test_a_calibration_that_holds_its_own_figures_stays_as_it_is():
    whole = with_device(document("calibrations", "mi250x-rccl"), "whole")
    assert with_device(whole, "mine") == whole


@pytest.mark.parametrize(
    ("compute", "said"),
    [("a10", "no device of that name is bundled"), ({"device": 100}, "the name of a device is needed, such as a100")],
)
def test_a_device_that_is_none_is_refused(compute, said):
    with pytest.raises(InputError, match=said):
        with_device({"compute": compute}, "mine")


@pytest.mark.parametrize("name", machine_names())
def test_a_step_on_two_nodes_of_every_machine_keeps_below_its_peak(name):
    """On one, where the machine has no second."""
    machine = load_machine(name)
    devices = min(2, machine.node_count) * machine.devices_per_node
    calibration = default_calibration(machine)
    precision = next(p for p in ("bf16", "fp16", "fp32") if p in calibration.compute.gemm_fraction)
    scenario = scenario_from_document(
        {
            "machine": name,
            "devices": devices,
            "model": {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000},
            "training": {"seq_len": 1024, "global_batch": 2 * devices, "precision": precision},
            "layout": {"tp": 1, "pp": 2, "micro_batch": 1},
        },
        "small",
    )
    prediction = predict(scenario, calibration, "recurrence")
    assert 0 < prediction.hfu < 1
