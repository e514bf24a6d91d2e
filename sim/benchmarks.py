"""Measured matrix products and attention kernels, which the laws of the devices were fitted on.

No prediction reads them; they are here so that what a device file says of its law's error can be
worked out again. One file a device in ``sim/gemm/`` and ``sim/attention/``, a case a row, with its source.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

from ..scenarios.fields import Precision
from .ops import FusedAttention, Gemm


@dataclass(frozen=True)
class MeasuredGemm:
    """A matrix product that somebody timed.

    Attributes:
        gemm: Its shape; the operands' precision stands in it.
        layer_pass: ``forward``, ``input_grad`` or ``weight_grad`` of a linear layer; empty where not said.
        result: Precision of the result.
        measured_on: The part it ran on.
        flop_per_s: What it reached.
        source: A key of docs/sources.md.
    """

    gemm: Gemm
    layer_pass: str
    result: Precision
    measured_on: str
    flop_per_s: float
    source: str


@dataclass(frozen=True)
class MeasuredAttention:
    """A causal attention kernel that somebody timed; FLOP as executed, half of the square."""

    op: FusedAttention
    measured_on: str
    flop_per_s: float
    source: str


def measured_gemms(device: str) -> list[MeasuredGemm]:
    """The products that were timed on a device.

    >>> len(measured_gemms("a100"))
    203
    """
    return [
        MeasuredGemm(
            gemm=Gemm(
                "product",
                m=int(row["m"]),
                n=int(row["n"]),
                k=int(row["k"]),
                count=int(row["count"]),
                grouped=row["kind"] == "grouped",
                precision=_precision(row["operands"]),
            ),
            layer_pass=row["pass"],
            result=_precision(row["result"]),
            measured_on=row["measured_on"],
            flop_per_s=float(row["tflops"]) * 1e12,
            source=row["source"],
        )
        for row in _rows("gemm", device)
    ]


def measured_attention(device: str) -> list[MeasuredAttention]:
    """The attention kernels that were timed on a device, one sequence each."""
    found = []
    for row in _rows("attention", device):
        heads, tokens, width = int(row["heads"]), int(row["tokens"]), int(row["head_dim"])
        backward = row["pass"] == "backward"
        products = 5 if backward else 2  # of a causal mask half is executed
        flop = products * 2.0 * heads * tokens * tokens * (width + int(row["value_dim"])) / 2 / 2
        op = FusedAttention("attention", flop, 0.0, width, heads, tokens, tokens, backward)
        found.append(MeasuredAttention(op, row["measured_on"], float(row["executed_tflops"]) * 1e12, row["source"]))
    return found


_PRECISIONS: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def _precision(text: str) -> Precision:
    return _PRECISIONS[text]


def _rows(folder: str, device: str) -> list[dict[str, str]]:
    text = (resources.files("exatwin.sim") / folder / f"{device}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
