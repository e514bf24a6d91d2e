"""How fast fused attention runs: by pass, head width, and how many blocks of queries there are.

A fused kernel gives each unit of the device a block of 128 queries of one head. Where there are few
blocks for each unit, the last ones to end leave the others idle, the more so since with a causal mask
the last block of a sequence has twice the mean of work. Sources: Dao 2023, arXiv 2307.08691 (the kernel
and its blocks); the shares and how well the law fits stand with each device.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ops import FusedAttention

BLOCK = 128  # queries of a block
USUAL = 128  # head width that the shares are given for


@dataclass(frozen=True, slots=True)
class AttentionPass:
    """One pass.

    Attributes:
        flop_per_s: Executed FLOP at a head width of 128 with many blocks.
        fill: Blocks a unit at which the pass takes twice as long as with many.
        wide: Share of the rate that is left at head widths above 128.
    """

    flop_per_s: float
    fill: float = 0.0
    wide: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Fused attention of a device.

    Attributes:
        forward: The forward pass.
        backward: The backward pass.
        units: Units that share the blocks.
        width_half: Head width at which half of the rate is lost: the softmax costs as much as so many more columns.
        pad: Head widths are filled up to a multiple of this.
    """

    forward: AttentionPass
    backward: AttentionPass
    units: int = 1
    width_half: float = 0.0
    pad: int = 1


def attention_flop_s(op: FusedAttention, rates: AttentionRates) -> float:
    """Seconds that the executed FLOP of a pass take.

    >>> rates = AttentionRates(AttentionPass(100e12, fill=1.0), AttentionPass(50e12), units=64)
    >>> attention_flop_s(FusedAttention("attention", 1e12, 0.0, 128, heads=2, queries=4096, keys=4096), rates)
    0.02
    """
    one = rates.backward if op.backward else rates.forward
    padded = -(-op.head_dim // rates.pad) * rates.pad
    width = min(padded, USUAL)
    share = width / (width + rates.width_half) * (USUAL + rates.width_half) / USUAL
    if padded > USUAL:
        share *= one.wide
    seconds = op.flop * padded / op.head_dim / (one.flop_per_s * share)
    if op.queries and one.fill:
        seconds *= 1 + one.fill * rates.units * BLOCK / (op.heads * op.queries)
    return seconds
