"""First values of the weights: they depend on the seed and each weight's name, never on how it is cut.

So a run in any layout starts from the same model, and a part of a weight is what the whole would have there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

SPREAD = 0.02  # standard deviation of GPT-2's weights; Radford et al. 2019, the released code (src/model.py)


def initial(
    name: str, shape: Sequence[int], seed: int, *, kind: str = "weight", layers: int = 1, rows: int | None = None
) -> torch.Tensor:
    """The whole of a weight, in fp32.

    Args:
        name: Its name in the whole model.
        shape: Of the whole weight.
        seed: Of the run.
        kind: ``weight`` normal; ``out`` likewise, less spread, as it adds to the stream once a block; ``one`` or
            ``zero`` for norms and biases.
        layers: Of the model; the spread of ``out`` goes down by the root of twice that (GPT-2, section 2.3).
        rows: Rows of dimension 0 that mean something; those behind only fill up and are 0.

    >>> initial("a", (2, 2), seed=1).equal(initial("a", (2, 2), seed=1))
    True
    """
    if kind == "one":
        return torch.ones(tuple(shape))
    if kind == "zero":
        return torch.zeros(tuple(shape))
    real = tuple(shape) if rows is None else (rows, *shape[1:])
    generator = torch.Generator().manual_seed((zlib.crc32(name.encode()) << 20) ^ seed)
    spread = SPREAD / math.sqrt(2 * layers) if kind == "out" else SPREAD
    values = torch.randn(real, generator=generator) * spread
    if real != tuple(shape):
        values = torch.cat([values, torch.zeros((shape[0] - real[0], *shape[1:]))])
    return values
