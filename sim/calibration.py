"""What was achieved, as data: a calibration belongs to a machine and a software stack.

A machine file says what a vendor printed; a calibration says which share of it a
stack reaches, from micro-benchmarks or fits, each figure with its source, and
names the rows a fit has used and what was left over on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ..scenarios.fields import Precision
from ..topology.errors import input_error
from ..topology.facts import Fact
from ..topology.files import build, bundled_names, read_document
from ..topology.machine import Machine
from ..topology.units import Bytes, BytesPerSecond, Seconds
from .devices import with_device
from .fits import with_fit, with_values

_STRICT = ConfigDict(frozen=True, extra="forbid")

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Reach = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]  # above 1 where a switch reduces on the way
Whole = Annotated[int, Field(strict=True, ge=1)]
Slowdown = Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TileLaw(BaseModel):
    """How the rate of a matrix product depends on its shape.

    The result is cut into tiles, each unit of the device works on one at a time, and a
    last wave that is not full costs as much as a full one; filling and draining a tile's
    pipeline costs as much as ``k_half`` more steps of the inner dimension.
    """

    model_config = _STRICT
    rows: Fact[Whole]
    columns: Fact[Whole]
    units: Fact[Whole] = Field(description="compute units that share the tiles")
    k_half: Fact[Size] = Field(description="inner dimension at which half of the rate is lost")
    fp8_k_half: Fact[Size] | None = Field(default=None, description="the same in fp8, where it differs")
    smallest: Fact[Whole] | None = Field(
        default=None, description="side of the smallest tile; left out: there is none but the largest"
    )
    intensity_half: Fact[Size] | None = Field(
        default=None, description="multiply-adds for each element read at which a tile loses half of the rate"
    )
    group_rows: Fact[Size] | None = Field(
        default=None, description="rows by which each matrix of a grouped product costs more than it has"
    )


class PassFigures(BaseModel):
    """Fused attention, one pass."""

    model_config = _STRICT
    share: Fact[Fraction] = Field(description="executed FLOP, of the peak, at a head width of 128 with many blocks")
    fill: Fact[Size] | None = Field(
        default=None, description="blocks of 128 queries a unit at which the pass takes twice as long as with many"
    )
    wide: Fact[Fraction] | None = Field(default=None, description="share of that left at head widths above 128")


class AttentionFigures(BaseModel):
    """Achieved rates of fused attention."""

    model_config = _STRICT
    forward: PassFigures
    backward: PassFigures
    width_half: Fact[Size] | None = Field(default=None, description="head width at which half of the rate is lost")
    pad: Fact[Whole] | None = Field(default=None, description="head widths are filled up to a multiple of this")


class ComputeFigures(BaseModel):
    """Achieved rates of one device, as fractions of what its vendor printed."""

    model_config = _STRICT
    gemm_fraction: dict[Precision, Fact[Fraction]] = Field(description="large matrix product, of the peak")
    gemm_tile: TileLaw
    attention: AttentionFigures
    memory_fraction: Fact[Fraction] = Field(description="element-wise work, of the memory bandwidth")
    sustained: Fact[Fraction] | None = Field(
        default=None,
        description="what products and attention keep of their rates alone in a whole run, as power and heat allow",
    )
    launch: Fact[Seconds] = Field(description="gap in front of each kernel")
    overlap_slowdown: Fact[Slowdown] | None = Field(
        default=None, description="how many times longer compute takes while communication runs beside it"
    )


class Protocol(BaseModel):
    """A way that a library hands data on, beside its plain one: sooner, at a lower rate."""

    model_config = _STRICT
    name: str
    share: Fact[Reach] = Field(description="of the rate that the plain protocol reaches")
    node_hop: Fact[Seconds] = Field(description="one step inside a node")
    fabric_hop: Fact[Seconds] = Field(description="one step between nodes")


class EagerFigures(BaseModel):
    """Messages that a library sends without asking the receiver first."""

    model_config = _STRICT
    most: Fact[Bytes] = Field(description="largest such message to a neighbour")
    more_per_hop: Fact[Bytes] = Field(description="what each hop of the way adds to that")
    start: Fact[Seconds] = Field(description="one such message, however small")
    fill: Fact[Seconds] = Field(description="fill of its copies, as `NetworkFigures.fill`")


class GateFigures(BaseModel):
    """Collectives that the network's interfaces carry on by themselves."""

    model_config = _STRICT
    most: Fact[Bytes] = Field(description="largest buffer of one")
    base: Fact[Seconds] = Field(description="start and end in software")
    hop: Fact[Seconds] = Field(description="one step from interface to interface")


class SwitchFigures(BaseModel):
    """Collectives that the switch of a node reduces."""

    model_config = _STRICT
    share: Fact[Reach] = Field(description="of a device's link to the switch")
    hop: Fact[Seconds] = Field(description="one trip to the switch and back")


class ReduceFigures(BaseModel):
    """Adding up what arrives, where that is not hidden behind the links."""

    model_config = _STRICT
    rate: Fact[BytesPerSecond] = Field(description="bytes that one member adds up a second")
    segment: Fact[Seconds] = Field(description="cost of each piece beside its bytes")


class NetworkFigures(BaseModel):
    """Achieved shares of the links, and latencies, of the collective library.

    Attributes:
        node_ring_plain: As ``node_ring``, where that counts a switch that reduces, or the fill of pieces; what
            `sim.communicate` takes where it is given.
    """

    model_config = _STRICT
    library: str
    node_ring: Fact[Reach] = Field(description="ring collective inside a node, of its links")
    node_ring_plain: Fact[Reach] | None = Field(
        default=None, description="the same for long messages, without a switch that reduces"
    )
    switch: SwitchFigures | None = None
    node_point_to_point: Fact[Reach] = Field(description="one message inside a node, of its links")
    fabric_ring: Fact[Reach] = Field(description="ring collective between nodes, of its NICs")
    fabric_point_to_point: Fact[Reach] = Field(description="one message between nodes, of its NIC")
    base: Fact[Seconds] = Field(description="start of a collective")
    node_hop: Fact[Seconds] = Field(description="one step of a ring inside a node")
    fabric_hop: Fact[Seconds] = Field(description="one step of a ring, or one message, between nodes")
    fill: Fact[Seconds] | None = Field(
        default=None,
        description="what a transfer's pipeline of pieces loses: twice the root of this times its own time",
    )
    fabric_fill: Fact[Seconds] | None = Field(default=None, description="the same over several nodes, if it differs")
    lanes: Fact[Whole] | None = Field(
        default=None, description="network ports that the messages of one process share; absent where all of them"
    )
    protocols: tuple[Protocol, ...] = Field(default=(), description="ways beside the plain one")
    eager: EagerFigures | None = None
    gates: GateFigures | None = None
    reduce: ReduceFigures | None = None


class MemoryFigures(BaseModel):
    """What stands beside the tensors of a run."""

    model_config = _STRICT
    context: Fact[Bytes] = Field(description="driver and communicators, outside the framework's allocator")
    reserve: Fact[Bytes] = Field(description="what the allocator reserves above the peak of its tensors")
    reserve_parameter: Fact[Bytes] | None = Field(
        default=None,
        description="what it reserves on top of that for each parameter of a rank: the large buffers of an optimizer's "
        "step, whose segments serve nothing else",
    )
    reserve_share: Fact[Fraction] | None = Field(
        default=None, description="what it reserves on top of that, of the activations and working sets at the peak"
    )


class StepFigures(BaseModel):
    """What a step costs beside its ops."""

    model_config = _STRICT
    overhead: Fact[Seconds] = Field(description="host work and waiting at the end of each step")
    hop_overhead: Fact[Seconds] = Field(description="the same, for each boundary between pipeline stages")
    dispatch: Fact[Seconds] | None = Field(
        default=None,
        description="host time to hand one kernel or collective to the device; absent where it never shows",
    )
    expert_pass: Fact[Seconds] | None = Field(
        default=None,
        description="host time of one pass of a layer with experts, most of it in the framework's own code: routing, "
        "counts fetched from the device, sends and grouped products; absent where it never shows",
    )


class Residual(BaseModel):
    """One row of a fit: predicted over measured, minus one."""

    model_config = _STRICT
    row: str
    error: float


class Fit(BaseModel):
    """How the fitted figures came about."""

    model_config = _STRICT
    parameters: list[str]
    command: str
    residuals: list[Residual]


class BenchmarkFit(BaseModel):
    """Which figures were fitted on timed messages and collectives, apart from any run."""

    model_config = _STRICT
    parameters: list[str]
    command: str


class Calibration(BaseModel):
    """A named set of achieved figures.

    Attributes:
        name: What a prediction quotes.
        machines: Bundled machines it is the default of.
        device: The device it was measured on.
        date: When it was made.
        software: The stack it belongs to.
        fit: The fit on whole runs, which gives a step its interval.
        benchmark_fit: The fit on benchmarks of the network.
    """

    model_config = _STRICT
    name: str
    title: str
    machines: list[str]
    device: str
    date: str
    software: str
    compute: ComputeFigures = Field(description="as a file: a device's name, or its figures beside ``device: NAME``")
    network: NetworkFigures
    memory: MemoryFigures
    step: StepFigures
    fit: Fit | None = None
    benchmark_fit: BenchmarkFit | None = None
    note: str | None = None

    def gemm_fraction(self, precision: Precision) -> float:
        """Share of the peak that a large matrix product reaches.

        Raises:
            InputError: If the calibration has no figure for that precision.
        """
        figures = self.compute.gemm_fraction
        if precision not in figures:
            raise input_error(
                f"has no matrix product figure for {precision}; it has {', '.join(figures)}",
                where=f"calibration {self.name}",
                field="compute.gemm_fraction",
            )
        return figures[precision].value

    def relative_spread(self) -> float | None:
        """Half width of the 80 % interval of a step, relative, from what the fit left over.

        With n rows and k fitted figures the residuals' variance is ``sum e^2 / (n - k)`` and the half
        width ``t s sqrt(1 + 1/n)``, t the two-sided 80 % point of Student's distribution with n - k
        degrees of freedom. None where nothing was fitted or nothing is left over.
        """
        if self.fit is None:
            return None
        errors = [residual.error for residual in self.fit.residuals]
        freedom = len(errors) - len(self.fit.parameters)
        if freedom <= 0:
            return None
        deviation = math.sqrt(sum(error**2 for error in errors) / freedom)
        return _STUDENT_80[min(freedom, len(_STUDENT_80)) - 1] * deviation * math.sqrt(1 + 1 / len(errors))


# Two-sided 80 % points of Student's t for 1, 2, 3, ... degrees of freedom (any table of the distribution).
_STUDENT_80 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)


def calibration_names() -> list[str]:
    """Names of the bundled calibrations."""
    return bundled_names("exatwin.sim", "calibrations")


def load_calibration(name: str) -> Calibration:
    """A calibration from its bundled name or a path.

    Raises:
        InputError: If there is none, or it breaks its schema.
    """
    document, where = calibration_document(name)
    return build(Calibration, document, where)


def calibration_document(name: str) -> tuple[dict[str, Any], str]:
    """A calibration as its file, its device's and its fit say it together, and where that stands.

    Raises:
        InputError: If there is none.
    """
    document, where = read_document(name, "exatwin.sim", "calibrations", "calibration")
    return with_fit(with_device(document, where), name), where


def calibration_with(name: str, figures: Mapping[str, float | str]) -> Calibration:
    """A calibration with other values in some figures, and no fit.

    Args:
        name: A bundled calibration or a path.
        figures: Dotted paths, such as ``step.dispatch``, with values as a file says them.

    Raises:
        InputError: If there is none, or a figure breaks the schema.
    """
    document, where = read_document(name, "exatwin.sim", "calibrations", "calibration")
    return build(Calibration, with_values(with_device(document, where), figures), where)


def default_calibration(machine: Machine) -> Calibration:
    """The bundled calibration of a machine.

    Raises:
        InputError: If none names that machine.
    """
    folder = resources.files("exatwin.sim") / "calibrations"
    for name in calibration_names():
        if machine.name not in (folder / f"{name}.yaml").read_text(encoding="utf-8"):
            continue  # parsing the others would take most of a prediction's time
        calibration = load_calibration(name)
        if machine.name in calibration.machines:
            return calibration
    raise input_error(
        f"no calibration is bundled for machine {machine.name}; give one with --calibration"
        f" (bundled: {', '.join(calibration_names())})",
        field="calibration",
    )
