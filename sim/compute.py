"""How long an op takes on one device: a roofline with achieved efficiencies.

``max(FLOP / (peak x efficiency), bytes / achieved memory bandwidth) + launch``,
after Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..scenarios.fields import Precision
from ..topology.machine import Machine
from .calibration import Calibration
from .ops import ELEMENT_BYTES, Elementwise, FusedAttention, Gemm


@dataclass(frozen=True)
class DeviceRates:
    """Achieved rates of one device in one precision.

    Attributes:
        gemm_flop_per_s: Large matrix products.
        attention_flop_per_s: Fused attention, executed FLOP.
        memory_bytes_per_s: Element-wise work.
        tile: Rows and columns of a tile of a product's result.
        units: Units of the device that share the tiles.
        k_half: Inner dimension at which a product loses half of its rate.
        element_bytes: Bytes of an operand.
        launch_s: Gap in front of a kernel.
    """

    gemm_flop_per_s: float
    attention_flop_per_s: float
    memory_bytes_per_s: float
    tile: tuple[int, int]
    units: int
    k_half: float
    element_bytes: int
    launch_s: float


def device_rates(machine: Machine, calibration: Calibration, precision: Precision) -> DeviceRates:
    """The rates that a calibration grants a machine's device.

    Raises:
        InputError: If the device has no peak or the calibration no figure for the precision.
    """
    peak = machine.device.peak_flop_per_s(precision)
    compute = calibration.compute
    return DeviceRates(
        gemm_flop_per_s=peak * calibration.gemm_fraction(precision),
        attention_flop_per_s=peak * compute.attention_fraction.value,
        memory_bytes_per_s=machine.device.memory_bandwidth_bytes_per_s * compute.memory_fraction.value,
        tile=(compute.gemm_tile.rows.value, compute.gemm_tile.columns.value),
        units=compute.gemm_tile.units.value,
        k_half=compute.gemm_tile.k_half.value,
        element_bytes=ELEMENT_BYTES[precision],
        launch_s=compute.launch.value,
    )


def shape_efficiency(gemm: Gemm, tile: tuple[int, int], units: int, k_half: float) -> float:
    """Share of the full rate that a product of this shape reaches, at most 1.

    The tile lies whichever way round wastes less; a batch of products shares the waves.

    >>> shape_efficiency(Gemm("x", 1024, 1024, 4096), (128, 256), units=64, k_half=0.0)
    0.5
    """
    waves = min(
        -(-gemm.count * -(-gemm.m // rows) * -(-gemm.n // columns) // units) for rows, columns in (tile, tile[::-1])
    )
    full = waves * units * tile[0] * tile[1]
    return gemm.count * gemm.m * gemm.n / full * gemm.k / (gemm.k + k_half)


def gemm_s(gemm: Gemm, rates: DeviceRates) -> float:
    """Seconds of matrix products, operands read and the result written once each."""
    moved = gemm.count * rates.element_bytes * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    flop_s = gemm.flop / (rates.gemm_flop_per_s * shape_efficiency(gemm, rates.tile, rates.units, rates.k_half))
    return max(flop_s, moved / rates.memory_bytes_per_s) + rates.launch_s


def op_s(op: Gemm | FusedAttention | Elementwise, rates: DeviceRates) -> float:
    """Seconds of one op of the device itself.

    >>> rates = DeviceRates(100e12, 50e12, 1e12, (128, 256), 110, 0.0, 2, 0.0)
    >>> op_s(Elementwise("copy", 2e9), rates)
    0.002
    """
    if isinstance(op, Gemm):
        return gemm_s(op, rates)
    if isinstance(op, FusedAttention):
        return max(op.flop / rates.attention_flop_per_s, op.bytes / rates.memory_bytes_per_s) + rates.launch_s
    return op.bytes / rates.memory_bytes_per_s + op.kernels * rates.launch_s
