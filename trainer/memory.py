"""What memory a rank takes, so that it means its tensors.

On a GPU the allocator knows. On a CPU it is the high-water mark of the resident set, less the pages of files (libraries
come in as they are used) and less a base that is read once torch is there and before the model is. malloc is told to
give large blocks back at once, so that what is freed is not counted.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGE = 65536  # bytes from which a block is mapped by itself


def give_back_at_once() -> None:
    """Tell malloc to map large blocks by themselves, so that what is freed leaves the process; glibc only.

    What is free already is let go, so that the model does not come to lie in it unseen.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, 0)
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return


def host_available_bytes() -> float:
    """Memory that new processes can take, by the kernel's estimate and the control group's limit."""
    available = float("inf")
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = 1024.0 * int(line.split()[1])
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            available = min(available, float(text) - float(used.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return available
    return available


def device_memory_bytes() -> float:
    """Memory of one GPU of this host, free now."""
    return float(torch.cuda.mem_get_info()[0])


def _status(field: str) -> float:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(field):
                return 1024.0 * int(line.split()[1])
    except OSError:
        return 0.0
    return 0.0


@dataclass
class MemoryMeter:
    """The peak of a rank since `reset`, above what the process had before its model.

    Args:
        device: Where its tensors lie.
    """

    device: torch.device
    base_bytes: float = 0.0

    def begin(self) -> None:
        """Before the model is built: what the process has now is not the model's."""
        if self.device.type == "cpu":
            give_back_at_once()
            warm = torch.ones(64, 64, requires_grad=True)
            (warm @ warm).sum().backward()
            self.base_bytes = _status("RssAnon:")
        self.reset()

    def reset(self) -> None:
        """Forget earlier peaks."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return  # then the peak is that of the whole run

    def peak_bytes(self) -> float:
        """The peak: of the allocator's tensors, or of the process's own pages above the base."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        files = _status("RssFile:") + _status("RssShmem:")
        return max(_status("VmHWM:") - files - self.base_bytes, 0.0)

    def reserved_bytes(self) -> float:
        """What the allocator held; on a CPU the peak again."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_reserved(self.device))
        return self.peak_bytes()


def load_average() -> float | None:
    """Processes that ran or waited on the host in the last minute, on average."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
