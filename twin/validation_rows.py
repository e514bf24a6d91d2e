"""One measured figure beside its prediction, and how a published run is turned into such rows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..scenarios.measurements import Use
from ..scenarios.published import MemoryKind, PublishedRun
from ..scenarios.result import Prediction
from ..scenarios.scenario import Scenario

Quantity = Literal["step", "rate", "memory", "verdict", "collective"]
Kind = Literal["time", "memory", "verdict", "message"]

KINDS: dict[Quantity, Kind] = {
    "step": "time",
    "rate": "time",
    "memory": "memory",
    "verdict": "verdict",
    "collective": "message",
}
HARDWARE_CONVENTIONS = frozenset({"megatron-hardware", "8n"})  # those that count recomputation


@dataclass(frozen=True)
class ValidationRow:
    """One measured figure and its prediction.

    Attributes:
        id: The published row, with the stage or the message where it has several.
        quantity: ``step`` (s), ``rate`` (FLOP/s of a device), ``memory`` (bytes), ``collective`` (s), or
            ``verdict``: 1 where it fits, 0 where it ran out of memory.
        series: The file of rows that it stands in; ``source`` is the key in docs/sources.md.
        device: The kind of device.
        use: ``fit``, ``unseen`` or ``context``.
        error: Predicted over measured, less one. Of a verdict: 0 where it is right, +1 where a run was
            said to fit that did not, -1 the other way round.
        bound: The error that this row alone may have; None where only its series has bounds, or nothing is claimed.
        group: Rows of one name differ in nothing but their layout.
        tokens: Tokens in a step, for what a row says of scaling.
        strong, weak: Rows of one name differ in nothing but the devices, and the replicas that they make:
            at the same batch, and at the same batch of a replica. Empty where nothing is to be compared.
        parts: Where the predicted step goes, seconds.
    """

    id: str
    quantity: Quantity
    series: str
    source: str
    machine: str
    device: str
    devices: int
    use: Use
    measured: float
    predicted: float
    error: float
    bound: float | None = None
    note: str = ""
    group: str = ""
    tokens: int = 0
    strong: str = ""
    weak: str = ""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """What it is about."""
        return KINDS[self.quantity]

    @property
    def within(self) -> bool:
        """Whether the error keeps to the row's own bound."""
        return self.bound is None or abs(self.error) <= self.bound


@dataclass(frozen=True)
class Unanswered:
    """A published run that was not predicted, and why: a rule that the scenario breaks, or a fault of ours."""

    id: str
    series: str
    reason: str
    fault: bool = False


def rows_of_run(run: PublishedRun, scenario: Scenario, prediction: Prediction) -> Iterator[ValidationRow]:
    """What was measured of a published run, beside the prediction."""
    common = common_fields(scenario, prediction) | {
        "id": run.id,
        "series": run.series,
        "source": run.source,
        "use": run.use,
        "note": run.note,
    }
    if run.step_s is not None:
        yield figure_row(common | {"group": run.group}, "step", run.step_s, prediction.step_s)
    elif run.tflops is not None:
        rates = prediction.tflops_per_device
        rate = rates.hardware if run.flop_convention in HARDWARE_CONVENTIONS else rates.model
        yield figure_row(common, "rate", run.tflops * 1e12, rate)
    if run.memory_bytes is not None:
        yield figure_row(common, "memory", run.memory_bytes, memory_as_printed(prediction, run.memory_kind))
    if run.verdict is not None or run.timed:
        yield verdict_row(common, prediction, ran=run.verdict != "oom")


def common_fields(scenario: Scenario, prediction: Prediction) -> dict[str, Any]:
    """What the rows of a run take from its scenario and its prediction."""
    strong, weak = scaling_keys(scenario)
    return {
        "machine": scenario.machine.name,
        "device": scenario.machine.device.name,
        "devices": scenario.devices,
        "tokens": scenario.tokens_per_step,
        "strong": strong,
        "weak": weak,
        "parts": parts_of(prediction),
    }


def figure_row(common: dict[str, Any], quantity: Quantity, measured: float, predicted: float) -> ValidationRow:
    """A figure beside its prediction."""
    error = predicted / measured - 1
    return ValidationRow(**common, quantity=quantity, measured=measured, predicted=predicted, error=error)


def verdict_row(common: dict[str, Any], prediction: Prediction, *, ran: bool) -> ValidationRow:
    """Whether a run that ran, or did not, was said to."""
    said = prediction.memory.verdict != "does not fit"
    error = float(said) - float(ran)
    return ValidationRow(**common, quantity="verdict", measured=float(ran), predicted=float(said), error=error)


def memory_as_printed(prediction: Prediction, kind: MemoryKind | None) -> float:
    """Bytes of the fullest device, as a framework prints them.

    ``allocated`` is its peak, ``reserved`` what its allocator holds, ``device`` what the driver counts:
    the reserve and what lies outside the allocator.
    """
    memory = prediction.memory
    if kind == "reserved":
        return max(stage.reserved_bytes for stage in memory.stages)
    if kind == "device":
        held = [getattr(stage, "device_bytes", stage.reserved_bytes + memory.context_bytes) for stage in memory.stages]
        return max(held)
    return max(stage.peak_bytes for stage in memory.stages)


def parts_of(prediction: Prediction) -> dict[str, float]:
    """Where the step goes, without what takes no time."""
    return {name: seconds for name, seconds in dataclasses.asdict(prediction.breakdown_s).items() if seconds > 0}


def scaling_keys(scenario: Scenario) -> tuple[str, str]:
    """Two names that scenarios share where only devices and replicas differ: at one batch, at one batch a replica."""
    training = scenario.training.model_dump(exclude={"global_batch", "tokens"})
    layout = scenario.layout.model_dump(exclude={"dp", "shard_group"})
    model = scenario.model.model_dump(exclude={"name", "source", "note"})
    text = repr((scenario.machine.name, scenario.framework.name, model, training, layout))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    batch = scenario.training.global_batch
    return f"{digest} batch {batch}", f"{digest} batch a replica {batch / scenario.dp:g}"
