"""The trainer's collectives: each call goes through a `Channel`, which logs what it sends and how long that took.

The log is the measurement of record: a profiler sees gloo's calls without group and size. Bytes are those that a ring
has a rank send, as in the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .clock import Clock

Work = Any  # what torch gives for a collective under way

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ring_bytes(op: str, size_bytes: float, members: int) -> float:
    """Bytes that a rank sends for a collective over a buffer.

    Args:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``; others send the buffer once.
        size_bytes: The whole buffer: before an all-reduce or reduce-scatter, after an all-gather.
        members: Ranks of the group.

    >>> ring_bytes("all_reduce", 8.0, 4), ring_bytes("all_gather", 8.0, 4)
    (12.0, 6.0)
    """
    part = (members - 1) / members * size_bytes
    return {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "all_to_all": part}.get(op, size_bytes)


@dataclass
class Call:
    """One call: points in time of the device's clock, and bytes that this rank sent.

    ``exposed``: pairs of points between which the rank waited and did nothing else.
    """

    group: str
    op: str
    bytes: float
    began: Any
    ended: Any
    exposed: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass
class CommLog:
    """What a rank sent since the log was last emptied, and when it ran something a second time.

    Attributes:
        clock: Of the device.
        calls: What was sent.
        second_runs: Points in time between which recomputation ran.
    """

    clock: Clock
    calls: list[Call] = field(default_factory=list)
    second_runs: list[tuple[Any, Any]] = field(default_factory=list)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Around recomputation."""
        began = self.clock.stamp()
        yield
        self.second_runs.append((began, self.clock.stamp()))

    def blocking(self, group: str, op: str, sent: float, run: Callable[[], Any]) -> Any:
        """Run a call that the rank waits for, and log it."""
        began = self.clock.stamp()
        result = run()
        ended = self.clock.stamp()
        self.calls.append(Call(group, op, sent, began, ended, [(began, ended)]))
        return result

    def sent(self, group: str, op: str, sent: float) -> Call:
        """Log a call that goes on beside the rank's work; whoever waits for it says when."""
        now = self.clock.stamp()
        call = Call(group, op, sent, now, now)
        self.calls.append(call)
        return call

    def take(self) -> tuple[list[Call], list[tuple[Any, Any]]]:
        """The calls and second runs so far; the log is empty afterwards."""
        taken = self.calls, self.second_runs
        self.calls, self.second_runs = [], []
        return taken


class LoggedWork(dist.Work):
    """A collective under way whose wait is logged as exposed; torch asks for its own class before it waits."""

    def __init__(self, work: Work, call: Call, clock: Clock) -> None:
        super().__init__()
        self._work, self._call, self._clock = work, call, clock

    def wait(self, *arguments: Any) -> Any:
        """Wait for it."""
        began = self._clock.stamp()
        result = self._work.wait(*arguments)
        self._call.ended = self._clock.stamp()
        self._call.exposed.append((began, self._call.ended))
        return result


@dataclass
class Shift:
    """A tensor on its way round a ring; ``sent`` is held until it has gone."""

    found: torch.Tensor
    sent: torch.Tensor
    works: list[LoggedWork]

    def wait(self) -> torch.Tensor:
        """What came from the previous member."""
        for work in self.works:
            work.wait()
        return self.found


@dataclass(frozen=True)
class Channel:
    """One group of ranks, with the log of what this rank sends in it.

    A group of one rank has no process group and sends nothing.

    Attributes:
        name: Its kind, as in a prediction's ``comm``: ``tp``, ``dp``, ``cp``, ``ep``, ...
        members: Global ranks, in the group's order.
        rank: This rank's place among them.
        group: torch's process group.
        log: Where calls are logged.
    """

    name: str
    members: tuple[int, ...]
    rank: int
    group: Any
    log: CommLog

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.members)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum over the group, in place."""
        if self.size > 1:
            self._run("all_reduce", _size(tensor), lambda: dist.all_reduce(tensor, op=op, group=self.group))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The group's tensors, one behind the other along a dimension."""
        if self.size == 1:
            return tensor
        local = tensor.movedim(dim, 0).contiguous()
        whole = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        self._run("all_gather", _size(whole), lambda: all_gather(whole, local, group=self.group))
        return whole.movedim(0, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's part, along a dimension, of the sum over the group."""
        if self.size == 1:
            return tensor
        whole = tensor.movedim(dim, 0).contiguous()
        local = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        self._run("reduce_scatter", _size(whole), lambda: reduce_scatter(local, whole, group=self.group))
        return local.movedim(0, dim)

    def all_to_all(
        self, tensor: torch.Tensor, out: Sequence[int] | None = None, into: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows to every member and from every member.

        Args:
            tensor: Rows of dimension 0, those for the first member first.
            out: How many rows go to each member; left out: as many to each.
            into: How many come from each.
        """
        if self.size == 1:
            return tensor
        local = tensor.contiguous()
        rows = local.shape[0] if into is None else sum(into)
        found = local.new_empty((rows, *local.shape[1:]))
        each = _size(local) / max(local.shape[0], 1)
        kept = local.shape[0] / self.size if out is None else out[self.rank]
        sent = each * (local.shape[0] - kept)
        self.log.blocking(
            self.name,
            "all_to_all",
            sent,
            lambda: dist.all_to_all_single(
                found,
                local,
                None if into is None else list(into),
                None if out is None else list(out),
                group=self.group,
            ),
        )
        return found

    def shift(self, tensor: torch.Tensor) -> Shift:
        """Begin sending a tensor to the next member and receiving the previous one's; all members do so together."""
        local = tensor.contiguous()
        found = torch.empty_like(local)
        after, before = self.members[(self.rank + 1) % self.size], self.members[(self.rank - 1) % self.size]
        call = self.log.sent(self.name, "sendrecv", _size(local))
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, local, after, self.group), dist.P2POp(dist.irecv, found, before, self.group)]
        )
        return Shift(found, local, [LoggedWork(work, call, self.log.clock) for work in works])

    def _run(self, op: str, size: float, run: Callable[[], Any]) -> None:
        self.log.blocking(self.name, op, ring_bytes(op, size, self.size), run)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
