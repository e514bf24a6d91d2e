"""ZeRO 2 and 3: torch's fully_shard, over all replicas or over groups of them.

Source: Zhao et al. 2023, arXiv 2304.11277, section 3 (units, full and hybrid shard).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ...scenarios.scenario import Scenario
from ..comm import Channel, LoggedWork, ring_bytes
from ..comm import all_gather as gather_single
from ..comm import reduce_scatter as scatter_single
from ..grid import Grid
from ..model import Spec, Stage
from .replicas import Owned, Whole, copied, holders_of, parts_of, placed, spec_of
from .tensor import local


class _Gathers:
    """fully_shard's gathers, logged."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        channel, size = self._channel, float(output_tensor.numel() * output_tensor.element_size())
        sent = ring_bytes("all_gather", size, channel.size)
        if not async_op:
            return channel.log.blocking(
                channel.name, "all_gather", sent, lambda: gather_single(output_tensor, input_tensor, group=group)
            )
        call = channel.log.sent(channel.name, "all_gather", sent)
        return LoggedWork(
            gather_single(output_tensor, input_tensor, group=group, async_op=True), call, channel.log.clock
        )


class _Scatters(_Gathers):
    """fully_shard's reductions, logged."""

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        channel, size = self._channel, float(input_tensor.numel() * input_tensor.element_size())
        sent = ring_bytes("reduce_scatter", size, channel.size)
        return channel.log.blocking(
            channel.name,
            "reduce_scatter",
            sent,
            lambda: scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op),
        )


@dataclass
class ShardedReplicas:
    """torch's fully_shard: embedding, each layer, and the head with its norm are units.

    The head stays gathered from forward to backward where there is no pipeline; so does a tied embedding, which is in
    the root unit with it. Hybrid shard is the same within each group, with the sums over the copies of a shard behind.
    """

    scenario: Scenario
    grid: Grid
    stages: Sequence[Stage]
    dtype: torch.dtype
    owned: list[Owned] = field(init=False)

    def __post_init__(self) -> None:
        layout, grid = self.scenario.layout, self.grid
        assert grid.mesh is not None
        self._reshards = layout.zero == 3 and layout.reshard_after_forward
        self._pipelined = layout.pp > 1 or layout.vpp > 1
        self._copies = grid["hybrid"]
        self._channel = grid["shard"] if self._copies.size > 1 else grid["dp"]
        mixed = (
            MixedPrecisionPolicy()
            if self.dtype == torch.float32
            else MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        )
        keep = self._reshards and self._pipelined
        for stage in self.stages:
            order = [spec_of(parameter) for parameter in stage.parameters()]
            units: list[tuple[nn.Module, bool]] = [(layer, self._reshards) for layer in stage.layers.values()]
            tied = self.scenario.model.tied
            if stage.embedding is not None and not (tied and stage.is_last):
                units.append((stage.embedding, self._reshards))
            if stage.head is not None and not tied:
                units.append((stage.head, keep))
            for module, reshard in [*units, (stage, keep)]:
                fully_shard(module, mesh=grid.mesh["shard"], reshard_after_forward=reshard, mp_policy=mixed)
            for parameter, spec in zip(stage.parameters(), order, strict=True):
                parameter.spec = spec  # type: ignore[attr-defined]
            for unit in _units(stage):
                self._log(unit)
        self._parameters = [parameter for parameter, _ in holders_of(self.stages)]
        self.owned = [
            Owned(
                _shard(parameter),
                None,
                [(0, _shard(parameter).numel(), self._holders(spec_of(parameter)))],
            )
            for parameter in self._parameters
        ]

    def _log(self, module: FSDPModule) -> None:
        module.set_custom_all_gather(_Gathers(self._channel))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_Scatters(self._channel))  # type: ignore[arg-type]
        module.set_gradient_divide_factor(1.0)  # sums, as everywhere here: the loss is divided
        module.set_force_sum_reduction_for_comms(True)
        if self._copies.size > 1:
            stream = torch.cuda.Stream(self.grid.device) if self.grid.device.type == "cuda" else None
            module.set_all_reduce_hook(self._sum_copies, stream=stream)

    def _sum_copies(self, gradient: torch.Tensor) -> None:
        self._copies.all_reduce(gradient)

    def _holders(self, spec: Spec) -> int:
        across = self.grid.tp.size if spec.cut is None else 1
        return across * self._copies.size * (2 if copied(self.scenario, spec) else 1)

    def run(self, stage: Stage) -> Callable[[torch.Tensor], torch.Tensor]:
        """The stage itself."""
        return stage

    @torch.no_grad()
    def begin(self) -> None:
        """No gradients yet."""
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Every micro-batch reduces, so each backward is a last one to torch."""
        return nullcontext()

    def after_backward(self, stage: Stage) -> None:
        """In a pipeline torch keeps weights gathered behind a backward; where they are given up, here they are."""
        if self._reshards and self._pipelined:
            for module in _units(stage):
                module.reshard()

    def squared_norm_alone(self, world: Channel) -> float | None:
        """Not known: units are summed as they come."""
        return None

    @torch.no_grad()
    def reduce(self) -> None:
        """What is left: sums over the tensor ranks, and over the two copies of a tied embedding."""
        partial = [_gradient(p) for p in self._parameters if spec_of(p).partial]
        if partial:
            whole = torch.cat([gradient.flatten() for gradient in partial])
            self.grid.tp.all_reduce(whole)
            sizes = [gradient.numel() for gradient in partial]
            for gradient, summed in zip(partial, whole.split(sizes), strict=True):
                gradient.copy_(summed.view_as(gradient))
        for parameter, owned in zip(self._parameters, self.owned, strict=True):
            if copied(self.scenario, spec_of(parameter)):
                self.grid["embedding"].all_reduce(_gradient(parameter))
            owned.gradient = _gradient(parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """The next forward gathers the new weights; gradients are given up."""
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            owned.gradient = parameter.grad = None

    @torch.no_grad()
    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Each parameter's shard of values and moments."""
        found: dict[str, torch.Tensor] = {}
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            for part, values in parts_of(owned, optimizer).items():
                found[f"{part}.{spec_of(parameter).name}"] = placed(
                    values.view_as(_shard(parameter)), Whole.of(parameter)
                )
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies in place."""
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            for part, values in parts_of(owned, optimizer).items():
                values.copy_(local(state[f"{part}.{spec_of(parameter).name}"]))

    def bytes_held(self) -> dict[str, float]:
        """Shards in fp32; below fp32 the weights that stay are the optimizer's."""
        size = float(sum(owned.master.numel() * 4 for owned in self.owned))
        return {"parameters": size if self.dtype == torch.float32 else 0.0, "gradients": size}


def _units(stage: Stage) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def _shard(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard."""
    return local(parameter.detach())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard of the gradient; an expert that no token came to has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
