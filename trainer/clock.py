"""Points in time on the device that does the work.

A CPU works when it is told to, so a point is what the host's clock says. A GPU is told ahead of time, so a point is
an event in its queue, which is read once the work is done.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Makes points in time and reads them.

    Attributes:
        zero_s: Of the host's clock, from which `at` counts. The processes of one host share its clock; ranks on
            several hosts set it together (`start_together`).
    """

    zero_s: float = 0.0

    def start_together(self) -> None:
        """Count from now on; ranks call it right behind a barrier, and agree as far as that let them go at once."""
        self.zero_s = time.perf_counter()

    def stamp(self) -> Any:
        """This point in the device's work."""
        return time.perf_counter()

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two points, once the device has passed them."""
        return float(ended - began)

    def at(self, point: Any) -> float:
        """Seconds from `zero_s` to a point."""
        return float(point) - self.zero_s

    def settle(self) -> None:
        """Wait until the device has done all that it was told."""


class DeviceClock(Clock):
    """Points in the queue of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = torch.cuda.Event(enable_timing=True)
        self._anchor()

    def _anchor(self) -> None:
        torch.cuda.synchronize(self._device)
        self._zero.record()
        torch.cuda.synchronize(self._device)
        self._anchor_s = time.perf_counter()

    def stamp(self) -> Any:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two events."""
        return float(began.elapsed_time(ended)) / 1e3

    def at(self, point: Any) -> float:
        """Seconds of the host's clock, through the event at which both were read together."""
        return self._anchor_s - self.zero_s + float(self._zero.elapsed_time(point)) / 1e3

    def settle(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock for a kind of device."""
    return DeviceClock(device) if device.type == "cuda" else Clock()
