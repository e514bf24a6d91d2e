"""The answers: a `Prediction` and a `Measurement` share these fields.

Plain frozen dataclasses in SI units. `document` turns one into the JSON
document that ``--json`` prints; ``SCHEMA_VERSION`` changes when a key does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Verdict = Literal["fits", "marginal", "does not fit"]


@dataclass(frozen=True)
class FlopRates:
    """FLOP/s of one device: ``model`` counts no recomputation, ``hardware`` counts it."""

    model: float
    hardware: float


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step on the slowest stage, by what that stage was doing.

    Communication is the exposed part. The parts sum to the step. ``bubble`` is
    the wait for another stage; ``other`` is host work once a step.
    """

    compute: float = 0.0
    recompute: float = 0.0
    tp_comm: float = 0.0
    pp_comm: float = 0.0
    dp_comm: float = 0.0
    cp_comm: float = 0.0
    ep_comm: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """The step, as the sum of its parts."""
        return float(sum(getattr(self, item.name) for item in dataclasses.fields(self)))


@dataclass(frozen=True)
class CommRecord:
    """One kind of communication as one rank of the slowest stage sees it in a step.

    Attributes:
        group: ``tp``, ``pp``, ``dp``, ``cp``, ``ep`` or ``embedding`` (first and last stage).
        op: ``all_reduce``, ``all_gather``, ``send``, ...
        algorithm: How it ran, such as ``ring``.
        bytes: Bytes this rank sent for it.
        count: How many times it ran.
        busy_s: Seconds it was under way.
        exposed_s: Seconds in which nothing else went on.
    """

    group: str
    op: str
    algorithm: str
    bytes: float
    count: int
    busy_s: float
    exposed_s: float


LinkPlace = Literal["node", "nic", "fabric"]


@dataclass(frozen=True)
class LinkLoad:
    """A link of the job, or many that carry alike.

    Attributes:
        name: The first of them.
        where: Inside nodes, at a NIC, or in the fabric.
        count: How many there are.
        bytes: What one carried in the step, one direction.
        busy: Of what it could have carried.
        users: Whose bytes those were, most first.
    """

    name: str
    where: LinkPlace
    count: int
    bytes: float
    busy: float
    users: tuple[str, ...]


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one stage at its peak, by what holds them; they sum to the peak."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """The peak, as the sum of its parts."""
        return float(sum(getattr(self, item.name) for item in dataclasses.fields(self)))


@dataclass(frozen=True)
class StageMemory:
    """Memory of one device of a stage.

    Attributes:
        stage: Pipeline stage.
        peak_bytes: What the framework calls max allocated.
        reserved_bytes: What its allocator is expected to hold at that peak.
        device_bytes: What the device's driver shows as taken: the allocator's and what lies outside it.
        peak_s: When in the step the peak comes.
        peak_during: The action under way then, such as ``backward of micro-batch 3``.
        parts: What the peak is made of.
        between_steps_bytes: What stays allocated from one step to the next.
    """

    stage: int
    peak_bytes: float
    reserved_bytes: float
    device_bytes: float
    peak_s: float
    peak_during: str
    parts: MemoryParts
    between_steps_bytes: float


@dataclass(frozen=True)
class Memory:
    """The verdict for the whole layout and each stage behind it.

    ``context_bytes`` (driver, communicators) lies outside the framework's allocator; ``reserve_bytes`` is what
    the allocator usually holds above the peak of its tensors, which a layout must have room for to fit.
    """

    verdict: Verdict
    capacity_bytes: float
    context_bytes: float
    reserve_bytes: float
    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)


@dataclass(frozen=True)
class Interval:
    """Where the step is expected with probability ``level``; ``step_s`` is None where no calibration says."""

    level: float
    step_s: tuple[float, float] | None
    basis: str


@dataclass(frozen=True)
class Campaign:
    """The whole training run, at this step time and with nothing lost to failures."""

    steps: int
    days: float
    node_hours: float
    device_hours: float


@dataclass(frozen=True)
class StageTime:
    """Seconds of one step on one stage: when it ended its last backward, and how long it was busy."""

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    busy_s: float
    end_s: float


@dataclass(frozen=True)
class Engine:
    """What the simulation itself cost, for the benchmark and for trust in its folds."""

    events: int
    ops: int
    solves: int
    lanes: int
    wall_s: float


@dataclass(frozen=True)
class Spread:
    """How a figure varied over the steps that count.

    Attributes:
        median: Of them.
        p10: One in ten is below.
        p90: One in ten is above.
        cv: Standard deviation over the mean.
    """

    median: float
    p10: float
    p90: float
    cv: float


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a real run.

    Attributes:
        step: Its number, from 0.
        loss: Mean over the tokens of the global batch.
        gradient_norm: Before clipping; None where it overflowed.
        step_s: Seconds of the slowest rank, waiting for data included.
        data_s: Of those, the wait for data.
        skipped: An overflow left the weights as they were.
        counted: It is past the warm-up, and no profiler or checkpoint disturbed it.
    """

    step: int
    loss: float
    gradient_norm: float | None
    step_s: float
    data_s: float
    skipped: bool
    counted: bool


@dataclass(frozen=True)
class RankMeasurement:
    """One rank of a real run: medians over the steps that count.

    Attributes:
        rank: Its number; ``pp``, ``dp``, ``cp`` and ``tp`` say where it stands.
        host: Where it ran.
        parameters: Parameters that it holds before ZeRO shards them.
        breakdown_s: Its own step by part.
        comm: What it sent.
        memory: Bytes at its peak by part; activations are what the peak has beside the known parts.
        peak_bytes: The peak of the step.
        reserved_bytes: What the allocator held then; on a CPU the peak.
    """

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    host: str
    parameters: int
    breakdown_s: Breakdown
    comm: tuple[CommRecord, ...]
    memory: MemoryParts
    peak_bytes: float
    reserved_bytes: float


@dataclass(frozen=True)
class Measurement:
    """The answer of a real run to one scenario; its fields are those of a `Prediction`, and what only a run can tell.

    Seconds, bytes, FLOP/s of one device. Times are medians over the steps that count.

    Attributes:
        spread_s: Of the step, so that a noisy host says how noisy it was.
        steps: Every step.
        warmup_steps: Steps before the run was steady, found from their times.
        data_s: Median wait for data.
        noise_scale: Gradient noise scale in sequences (McCandlish et al. 2018, arXiv 1812.06162, section 2.2); None
            where one replica makes all gradients, so that there is none to compare.
        profiler_overhead: Share by which profiled steps were slower than those that count; None without profiler.
        ranks: What each rank saw.
        environment: Versions, devices and load of the hosts.
    """

    scenario: dict[str, Any]
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    tflops_per_device: FlopRates
    mfu: float
    hfu: float
    breakdown_s: Breakdown
    slowest_stage: int
    comm: tuple[CommRecord, ...]
    stages: tuple[StageTime, ...]
    memory: Memory
    interval: Interval
    spread_s: Spread
    steps: tuple[MeasuredStep, ...]
    warmup_steps: int
    data_s: float
    noise_scale: float | None
    profiler_overhead: float | None
    ranks: tuple[RankMeasurement, ...]
    environment: dict[str, Any]
    warnings: tuple[str, ...] = field(default=())

    def document(self, version: str) -> dict[str, Any]:
        """The JSON document of ``--json``; ``tflops_per_device`` in 1e12 FLOP/s."""
        return _document(self, version)


@dataclass(frozen=True)
class Prediction:
    """The answer of the simulated run to one scenario. Seconds, bytes, FLOP/s of one device."""

    scenario: dict[str, Any]
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    tflops_per_device: FlopRates
    mfu: float
    hfu: float
    breakdown_s: Breakdown
    slowest_stage: int
    comm: tuple[CommRecord, ...]
    links: tuple[LinkLoad, ...]
    stages: tuple[StageTime, ...]
    memory: Memory
    interval: Interval
    campaign: Campaign | None
    calibration: str
    fidelity: str
    network: str
    engine: Engine
    warnings: tuple[str, ...] = field(default=())

    def document(self, version: str) -> dict[str, Any]:
        """The JSON document of ``--json``; ``tflops_per_device`` in 1e12 FLOP/s.

        The engine's wall time is left out, so that the same input gives the same document.
        """
        document = _document(self, version)
        del document["engine"]["wall_s"]
        return document


def _document(answer: Prediction | Measurement, version: str) -> dict[str, Any]:
    """The fields of an answer as plain JSON types, with the schema's version first and the program's last."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    document.update(dataclasses.asdict(answer))
    document["tflops_per_device"] = {
        "model": answer.tflops_per_device.model / 1e12,
        "hardware": answer.tflops_per_device.hardware / 1e12,
    }
    document["exatwin_version"] = version
    return document
