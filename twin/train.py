"""The real run of a scenario: checked, its memory predicted first, then trained and measured.

torch is imported only once the scenario has been found to be what the trainer runs.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..scenarios.result import Measurement, Prediction
from ..scenarios.scenario import Scenario, scenario_from_document
from ..sim.predict import predict
from ..topology.errors import InputError, input_error
from ..trainer.options import TrainOptions
from ..trainer.refusals import assumptions, check_runs

if TYPE_CHECKING:
    from ..trainer.worker import StepNews

FRAMEWORK = "exatwin"
PROCESS_BYTES = 365 * 2**20  # resident size of a process with torch after a first tiny step; measured, torch 2.13, CPU


@dataclass(frozen=True)
class Trained:
    """What a run gave.

    Attributes:
        scenario: As it was trained, with the trainer's own framework.
        measurement: What was measured; None on a rank of a job that is not its first.
        stopped: Whether it was asked to stop before its last step.
    """

    scenario: Scenario
    measurement: Measurement | None
    stopped: bool


def train(
    scenario: Scenario,
    options: TrainOptions,
    tell: Callable[[StepNews], None] = lambda news: None,
    note: Callable[[str], None] = lambda text: None,
    *,
    force: bool = False,
) -> Trained:
    """Train a scenario on the devices at hand and measure it.

    Started by torchrun or srun this process is one rank of the job; else it starts all ranks on this host.

    Args:
        scenario: What is trained.
        options: How.
        tell: Told of each step.
        note: Told of what people should know while it runs.
        force: Run even if the predicted memory is more than there is.

    Raises:
        InputError: If the trainer does not run it, or memory, data, checkpoint or devices do not suffice.
        RankDiedError: If a rank died.
    """
    ours, warnings = as_trained(scenario)
    check_runs(ours, scenario.name)
    _check_options(options)
    try:
        from ..trainer.launch import join, joined, launch, local_devices
        from ..trainer.measure import measurement
    except ImportError as error:
        raise input_error(f"torch cannot be imported: {error}; exatwin's trainer needs torch 2.6 or newer") from None

    seat = joined(os.environ)
    devices = local_devices(options)
    if devices is None and ours.machine.name != "local":
        where = ours.machine.name
        warnings.append(f"the run is on the cores of this host, not on {where}; its shares of peak mean nothing")
    if seat is None:
        _check_devices(ours, devices)
        if not force:
            _check_memory(ours, devices)
        outcome = launch(ours, options, tell, note)
    else:
        outcome = join(ours, options, seat, tell)
    if outcome.restarts:
        warnings.append(f"the run began again {outcome.restarts} times; what is measured is its last part")
    if outcome.reports is None:
        return Trained(ours, None, outcome.stopped)
    return Trained(ours, measurement(ours, outcome.reports, warnings), outcome.stopped)


def as_trained(scenario: Scenario) -> tuple[Scenario, list[str]]:
    """The scenario with the trainer as its framework, and what is to be said of that.

    Raises:
        InputError: If the trainer's framework has not what the scenario asks.
    """
    warnings = list(assumptions(scenario))
    if scenario.framework.name == FRAMEWORK:
        return scenario, warnings
    warnings.append(f"trained with exatwin's own trainer, where the scenario says {scenario.framework.name}")
    ours = scenario_from_document({**scenario.document(), "framework": FRAMEWORK}, scenario.name)
    return ours, warnings


def _check_options(options: TrainOptions) -> None:
    """What else has to be there; found out before any rank is started."""
    if not _installed("torch"):
        raise input_error("torch is not installed; install exatwin with its extra: pip install 'exatwin[trainer]'")
    if options.tensorboard is not None and not _installed("tensorboard"):
        raise input_error("tensorboard is not installed: pip install tensorboard", field="--tensorboard")
    for name, path in (("--checkpoint", options.checkpoint), ("--tensorboard", options.tensorboard)):
        if path is not None:
            _check_folder(name, path)
    profile = options.profile
    if profile is not None and profile.exists() and not profile.is_file():
        raise input_error(f"{profile} is no file that a trace can take the place of", field="--profile")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # one that is kept out of the way
        return False


def _check_folder(name: str, path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise input_error(f"{path} is no folder", field=name)
    above = next(folder for folder in (path, *path.resolve().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".exatwin-", dir=above):  # a right to write is not yet a place to
            pass
    except OSError as error:
        raise input_error(f"{path} cannot be written: {error.strerror or error}", field=name) from None


def _check_devices(scenario: Scenario, devices: int | None) -> None:
    if devices == 0:
        raise input_error("this host has no GPU that torch can use; use --device cpu", field="--device")
    if devices is not None and scenario.devices > devices:
        raise input_error(
            f"devices={scenario.devices} ranks are more than the {devices} GPUs of this host; start them with torchrun "
            f"or srun over several, set devices={devices}, or use --device cpu",
            field="devices",
        )


def predicted(scenario: Scenario) -> Prediction | None:
    """What the simulation says of it; None where the machine has no calibration."""
    try:
        return predict(scenario, fidelity="recurrence")
    except InputError:
        return None


def _check_memory(scenario: Scenario, devices: int | None) -> None:
    """Predict first: refuse a run that this host cannot hold."""
    from ..trainer.memory import device_memory_bytes, host_available_bytes

    prediction = predicted(scenario)
    if prediction is None:
        return
    ranks = scenario.devices // scenario.layout.pp
    if devices is None:
        needed = sum(stage.peak_bytes for stage in prediction.memory.stages) * ranks + PROCESS_BYTES * scenario.devices
        there, whose = host_available_bytes(), "this host has free"
    else:
        needed, there, whose = prediction.memory.worst.reserved_bytes, device_memory_bytes(), "a device has"
    if needed > there:
        raise input_error(
            f"{scenario.devices} ranks are predicted to take {needed / 2**30:.1f} GiB, more than the "
            f"{there / 2**30:.1f} GiB that {whose}; use fewer ranks, a smaller micro_batch or zero=3, or --force",
            where=scenario.name,
        )
