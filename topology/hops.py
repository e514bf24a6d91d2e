"""Which message uses which link: the form in which every kind of route is told."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Hops(NamedTuple):
    """Which message uses which link, and how much of it: three arrays of one length."""

    message: Ints
    link: Ints
    share: Floats


class Lanes(NamedTuple):
    """How messages leave one node and enter another: a message that spreads has several lanes.

    Attributes:
        message: The message of each lane.
        out_nic: Port it leaves by.
        in_nic: Port it enters by.
        share: The part of the message that takes this lane.
    """

    message: Ints
    out_nic: Ints
    in_nic: Ints
    share: Floats


def join(parts: list[Hops]) -> Hops:
    """All the hops of several lists."""
    if not parts:
        return Hops(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Hops(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def hops(message: Ints, link: Ints, share: float | Floats = 1.0) -> Hops:
    """Hops of one share, or of a share each."""
    return Hops(message, link, np.broadcast_to(np.asarray(share, dtype=np.float64), message.shape))


def run_starts(ordered: Ints) -> Ints:
    """Where each run of equal numbers begins.

    >>> run_starts(np.array([3, 3, 5, 8, 8])).tolist()
    [0, 2, 3]
    """
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])
