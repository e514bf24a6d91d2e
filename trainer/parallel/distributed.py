"""torch's DistributedDataParallel: gradients reduced in buckets beside the last backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm import Channel, ring_bytes
from ..grid import Grid
from ..model import Stage
from .replicas import Owned, holders_of, parts_of, spec_of
from .tensor import local


class DistributedReplicas:
    """Gradients reduced in buckets beside the last backward. Needs plain parameters, fp32 and no pipeline."""

    def __init__(self, grid: Grid, stages: Sequence[Stage]) -> None:
        (stage,) = stages
        self._channel, self._grid = grid["dp"], grid
        self._wrapped = nn.parallel.DistributedDataParallel(
            stage,
            process_group=self._channel.group,
            gradient_as_bucket_view=True,
            device_ids=[grid.device.index] if grid.device.type == "cuda" else None,
        )
        self._wrapped.register_comm_hook(None, self._bucket)
        self._parameters = [parameter for parameter, _ in holders_of(stages)]
        holders = self._channel.size
        self.owned = [
            Owned(parameter.detach(), None, [(0, parameter.numel(), holders)]) for parameter in self._parameters
        ]
        self._calls: list[Any] = []

    def _bucket(self, _, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and not as text
        buffer, channel = bucket.buffer(), self._channel
        size = float(buffer.numel() * buffer.element_size())
        call = channel.log.sent(channel.name, "all_reduce", ring_bytes("all_reduce", size, channel.size))
        self._calls.append(call)
        work = dist.all_reduce(buffer, group=channel.group, async_op=True)

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            call.ended = channel.log.clock.stamp()
            return buffer

        return work.get_future().then(done)

    def run(self, stage: Stage) -> Callable[[torch.Tensor], torch.Tensor]:
        """The wrapped stage."""
        return self._wrapped

    @torch.no_grad()
    def begin(self) -> None:
        """No gradients yet."""
        self._wrapped.zero_grad(set_to_none=False)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Only the last micro-batch reduces."""
        return nullcontext() if last else self._wrapped.no_sync()

    def after_backward(self, stage: Stage) -> None:
        """From the last bucket's start on the backward waited."""
        if self._calls:
            last = self._calls[-1]
            last.exposed.append((last.began, self._channel.log.clock.stamp()))
            self._calls = []

    def squared_norm_alone(self, world: Channel) -> float | None:
        """Not known: buckets are summed as they come."""
        return None

    @torch.no_grad()
    def reduce(self) -> None:
        """Done already."""
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            owned.gradient = parameter.grad

    @torch.no_grad()
    def publish(self) -> None:
        """Every rank has updated all."""

    @torch.no_grad()
    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Each parameter's values and moments."""
        return {
            f"{part}.{spec_of(parameter).name}": values
            for owned, parameter in zip(self.owned, self._parameters, strict=True)
            for part, values in parts_of(owned, optimizer).items()
        }

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies in place."""
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            for part, values in parts_of(owned, optimizer).items():
                values.copy_(local(state[f"{part}.{spec_of(parameter).name}"]))

    def bytes_held(self) -> dict[str, float]:
        """All in fp32."""
        size = float(sum(parameter.numel() * 4 for parameter in self._parameters))
        return {"parameters": size, "gradients": size}
