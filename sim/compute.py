"""How long an op takes on one device: a roofline with achieved efficiencies.

``max(FLOP / (peak x efficiency), bytes / achieved memory bandwidth) + launch``,
after Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785. What a product's
shape does to its efficiency stands in `gemm_law`, what a head's does in `attention_law`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..scenarios.fields import Precision
from ..topology.errors import input_error
from ..topology.machine import Machine
from .attention_law import AttentionPass, AttentionRates, attention_flop_s
from .calibration import AttentionFigures, Calibration, PassFigures
from .gemm_law import GemmRates, gemm_bytes, shape_efficiency, tiles_of
from .ops import ELEMENT_BYTES, Elementwise, FusedAttention, Gemm

OPERAND_BYTES = {**ELEMENT_BYTES, "fp8": 1}


@dataclass(frozen=True)
class DeviceRates:
    """Achieved rates of one device for a training in one precision.

    Attributes:
        gemms: Matrix products by the precision of their operands.
        precision: Of the operands of a product that names none.
        attention: Fused attention.
        memory_bytes_per_s: Element-wise work.
        launch_s: Gap in front of a kernel.
        overlap_slowdown: How many times longer compute takes while communication runs beside it.
    """

    gemms: Mapping[Precision, GemmRates]
    precision: Precision
    attention: AttentionRates
    memory_bytes_per_s: float
    launch_s: float
    overlap_slowdown: float = 1.0

    def gemm_rates(self, gemm: Gemm) -> GemmRates:
        """The rates of a product's precision.

        Raises:
            InputError: If the device has none.
        """
        precision = gemm.precision or self.precision
        if precision not in self.gemms:
            message = f"the device has no matrix products in {precision}; it has {', '.join(self.gemms)}"
            raise input_error(message, field="precision")
        return self.gemms[precision]


def device_rates(machine: Machine, calibration: Calibration, precision: Precision) -> DeviceRates:
    """The rates that a calibration grants a machine's device.

    A training in fp8 runs its matrix products in fp8 where they name it, all else in bf16. A precision that
    the device has and the calibration does not takes the share of the training's own.

    Raises:
        InputError: If the device has no peak or the calibration no figure for the precision.
    """
    device, compute = machine.device, calibration.compute
    usual: Precision = "bf16" if precision == "fp8" else precision
    for needed in dict.fromkeys((precision, usual)):
        device.peak_flop_per_s(needed)
        calibration.gemm_fraction(needed)
    share = calibration.gemm_fraction(usual)
    sustained = compute.sustained.value if compute.sustained else 1.0
    law = compute.gemm_tile
    tiles = tiles_of(law)
    gemms: dict[Precision, GemmRates] = {}
    for known in device.peak:
        figure = compute.gemm_fraction.get(known)
        k_half = law.fp8_k_half if known == "fp8" and law.fp8_k_half else law.k_half
        gemms[known] = GemmRates(
            flop_per_s=device.peak_flop_per_s(known) * (figure.value if figure else share) * sustained,
            tiles=tiles,
            units=law.units.value,
            k_half=k_half.value,
            group_rows=law.group_rows.value if law.group_rows else 0.0,
            operand_bytes=OPERAND_BYTES[known],
            result_bytes=ELEMENT_BYTES[known],
        )
    return DeviceRates(
        gemms=gemms,
        precision=usual,
        attention=_attention(compute.attention, device.peak_flop_per_s(usual) * sustained, law.units.value),
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s * compute.memory_fraction.value,
        launch_s=compute.launch.value,
        overlap_slowdown=compute.overlap_slowdown.value if compute.overlap_slowdown else 1.0,
    )


def _attention(figures: AttentionFigures, peak: float, units: int) -> AttentionRates:
    def one(given: PassFigures) -> AttentionPass:
        return AttentionPass(
            flop_per_s=peak * given.share.value,
            fill=given.fill.value if given.fill else 0.0,
            wide=given.wide.value if given.wide else 1.0,
        )

    return AttentionRates(
        forward=one(figures.forward),
        backward=one(figures.backward),
        units=units,
        width_half=figures.width_half.value if figures.width_half else 0.0,
        pad=figures.pad.value if figures.pad else 1,
    )


def gemm_s(gemm: Gemm, rates: DeviceRates) -> float:
    """Seconds of matrix products, operands read and the result written once each."""
    own = rates.gemm_rates(gemm)
    flop_s = gemm.flop / (own.flop_per_s * shape_efficiency(gemm, own))
    return max(flop_s, gemm_bytes(gemm, own) / rates.memory_bytes_per_s) + rates.launch_s


def op_s(op: Gemm | FusedAttention | Elementwise, rates: DeviceRates) -> float:
    """Seconds of one op of the device itself.

    >>> attention = AttentionRates(AttentionPass(50e12), AttentionPass(40e12))
    >>> rates = DeviceRates({}, "fp16", attention, memory_bytes_per_s=1e12, launch_s=0.0)
    >>> op_s(Elementwise("copy", 2e9), rates)
    0.002
    """
    if isinstance(op, Gemm):
        return gemm_s(op, rates)
    if isinstance(op, FusedAttention):
        return max(attention_flop_s(op, rates.attention), op.bytes / rates.memory_bytes_per_s) + rates.launch_s
    return op.bytes / rates.memory_bytes_per_s + op.kernels * rates.launch_s
