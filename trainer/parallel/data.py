"""Data parallelism: what replicas share, how their gradients are summed, and how new weights come back.

- ZeRO 0 and 1 (`FlatReplicas`): weights of a rank lie in one buffer, their gradients are added up in fp32 in another.
  Once a step the sum over the replicas is made: an all-reduce, or with ZeRO-1 a reduce-scatter after which each rank
  updates its part and the new weights are gathered, as Megatron's distributed optimizer does. torch's
  ZeroRedundancyOptimizer makes an all-reduce and a broadcast of it.
- `DistributedReplicas`: torch's DistributedDataParallel, where gradients are to be reduced beside the backward.
- ZeRO 2 and 3 (`ShardedReplicas`): torch's fully_shard, over all replicas or over groups of them.

Experts stand on fewer ranks than the rest, so they have groups, and buffers, of their own.
Sources: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement

from ...scenarios.scenario import Scenario
from ..comm import Channel, LoggedWork, ring_bytes
from ..comm import all_gather as gather_single
from ..comm import reduce_scatter as scatter_single
from ..grid import Grid, embedding_ranks
from ..model import Spec, Stage
from .tensor import local

PARTS = ("weight", "exp_avg", "exp_avg_sq")  # what a checkpoint holds of each parameter; Adam's names in torch


@dataclass
class Owned:
    """A run of elements that this rank updates.

    Attributes:
        master: Their fp32 values, which the optimizer updates.
        gradient: Their summed gradients; None before they are.
        copies: Runs of elements, as (begin, end), and how many ranks of the job own the same; for the norm.
    """

    master: torch.Tensor
    gradient: torch.Tensor | None
    copies: list[tuple[int, int, int]]

    @cached_property
    def held(self) -> nn.Parameter:
        """The values as what an optimizer takes."""
        return nn.Parameter(self.master)


class Replicas(Protocol):
    """What the loop asks of the way in which replicas share the model."""

    owned: list[Owned]

    def run(self, stage: Stage) -> Callable[[torch.Tensor], torch.Tensor]:
        """What runs a stage's forward."""
        ...

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around the passes of one micro-batch, where there is no pipeline."""
        ...

    def after_backward(self, stage: Stage) -> None:
        """After each backward, whole or half, of a stage."""
        ...

    def squared_norm_alone(self, world: Channel) -> float | None:
        """After the last backward: the mean over the replicas of their own gradients' squared norm, if it is known."""
        ...

    def reduce(self) -> None:
        """After the last backward: `owned` has its summed gradients."""
        ...

    def publish(self) -> None:
        """After the optimizer: every rank has the new weights."""
        ...

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: of each parameter its fp32 value and Adam's moments; they know the whole."""
        ...

    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Take over such a state."""
        ...

    def bytes_held(self) -> dict[str, float]:
        """Bytes of parameters and gradients on this rank."""
        ...


def replicas_of(scenario: Scenario, grid: Grid, stages: Sequence[Stage], dtype: torch.dtype) -> Replicas:
    """The way that a layout names.

    Args:
        scenario: What is trained.
        grid: The rank.
        stages: Its virtual stages, with weights in what `storage_type` says.
        dtype: What layers compute in.
    """
    layout = scenario.layout
    if layout.zero >= 2:
        return ShardedReplicas(scenario, grid, stages, dtype)
    if layout.overlap_grad_reduce and layout.zero == 0 and grid["dp"].size > 1:
        return DistributedReplicas(grid, stages)
    return FlatReplicas(scenario, grid, stages, dtype)


def storage_type(scenario: Scenario, dtype: torch.dtype) -> torch.dtype:
    """What weights are kept in: as computed with, or with fully_shard in fp32."""
    return torch.float32 if scenario.layout.zero >= 2 else dtype


Holder = tuple[nn.Module, str]  # a module, and what it calls a parameter


def holders_of(stages: Sequence[Stage]) -> list[tuple[nn.Parameter, list[Holder]]]:
    """Every parameter of a rank once, with all modules that hold it: a tied embedding's words have two."""
    found: dict[int, tuple[nn.Parameter, list[Holder]]] = {}
    for stage in stages:
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    return list(found.values())


def spec_of(parameter: torch.Tensor) -> Spec:
    """How a parameter is cut."""
    spec: Spec = parameter.spec  # type: ignore[attr-defined]
    return spec


def _copied(scenario: Scenario, spec: Spec) -> bool:
    """Whether a weight is that of a tied embedding which stands on two pipeline ranks."""
    first, last = embedding_ranks(scenario)
    return spec.name == "embedding.words" and scenario.model.tied and first != last


# --- ZeRO 0 and 1 ---------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """A parameter in the buffer of its family, and the one that it was made from, which knows the whole."""

    parameter: nn.Parameter
    whole: _Whole | None
    begin: int
    end: int


@dataclass
class _Family:
    """Parameters that the same ranks hold: their weights in one buffer, their gradients in another."""

    channel: Channel
    zero: int
    places: list[_Place]
    size: int
    weights: torch.Tensor
    gradients: torch.Tensor
    owned: Owned
    words: tuple[int, int] = (0, 0)
    partial: tuple[int, int] = (0, 0)

    @property
    def mine(self) -> slice:
        """The part of the buffer that this rank updates."""
        if self.zero == 0:
            return slice(0, self.weights.numel())
        each = self.weights.numel() // self.channel.size
        return slice(self.channel.rank * each, (self.channel.rank + 1) * each)


class FlatReplicas:
    """ZeRO 0 and 1 over flat buffers."""

    def __init__(self, scenario: Scenario, grid: Grid, stages: Sequence[Stage], dtype: torch.dtype) -> None:
        self._grid, self._dtype, self._zero = grid, dtype, scenario.layout.zero
        self._scenario = scenario
        everything = holders_of(stages)
        dense = [entry for entry in everything if not spec_of(entry[0]).expert]
        experts = [entry for entry in everything if spec_of(entry[0]).expert]
        self._families = [self._family(dense, grid["dp"])]
        if experts:
            self._families.append(self._family(experts, grid["edp"]))
        self.owned = [family.owned for family in self._families]

    def _family(self, entries: list[tuple[nn.Parameter, list[Holder]]], channel: Channel) -> _Family:
        def order(entry: tuple[nn.Parameter, list[Holder]]) -> int:
            spec = spec_of(entry[0])
            return 0 if _copied(self._scenario, spec) else 1 if spec.cut is not None else 3 if spec.partial else 2

        entries = sorted(entries, key=order)
        size = sum(local(parameter).numel() for parameter, _ in entries)
        shards = channel.size if self._zero else 1
        whole = -(-size // shards) * shards
        weights = torch.zeros(whole, dtype=self._dtype, device=self._grid.device)
        gradients = torch.zeros(whole, dtype=torch.float32, device=self._grid.device)
        places, words, partial, at = [], (0, 0), (size, size), 0
        copies: list[tuple[int, int, int]] = []
        for parameter, holders in entries:
            values = local(parameter.detach())
            end = at + values.numel()
            view = weights[at:end].view_as(values)
            view.copy_(values)
            # Blocks compute with the plain part: a DTensor costs a tenth of a millisecond each time it is touched.
            made = nn.Parameter(view)
            made.spec = spec = spec_of(parameter)  # type: ignore[attr-defined]
            for module, name in holders:
                module._parameters[name] = made
            places.append(_Place(made, _Whole.of(parameter), at, end))
            if _copied(self._scenario, spec):
                words = (at, end)
            if spec.partial and partial[0] == size:
                partial = (at, size)
            copies.append((at, end, self._holders(spec)))
            at = end
        family = _Family(
            channel, self._zero, places, size, weights, gradients, Owned(weights, None, copies), words, partial
        )
        mine = family.mine
        if self._dtype == torch.float32:
            family.owned.master = weights[mine]
        else:
            family.owned.master = weights[mine].float()
        family.owned.copies = [
            (max(begin, mine.start) - mine.start, min(end, mine.stop) - mine.start, ranks)
            for begin, end, ranks in copies
            if begin < mine.stop and end > mine.start
        ]
        for place in places:
            place.parameter.register_post_accumulate_grad_hook(self._adder(gradients, place))
        return family

    def _holders(self, spec: Spec) -> int:
        """Ranks that own the same element."""
        grid = self._grid
        across = (grid["etp"] if spec.expert else grid.tp).size if spec.cut is None else 1
        replicas = 1 if self._zero else (grid["edp"] if spec.expert else grid["dp"]).size
        return across * replicas * (2 if _copied(self._scenario, spec) else 1)

    @staticmethod
    def _adder(gradients: torch.Tensor, place: _Place) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                with torch.no_grad():
                    gradients[place.begin : place.end].view_as(parameter).add_(parameter.grad)
                parameter.grad = None

        return add

    def run(self, stage: Stage) -> Callable[[torch.Tensor], torch.Tensor]:
        """The stage itself."""
        return stage

    @torch.no_grad()
    def begin(self) -> None:
        """No gradients yet."""
        for family in self._families:
            family.gradients.zero_()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Nothing to do: gradients are added up as they come."""
        return nullcontext()

    def after_backward(self, stage: Stage) -> None:
        """Add up what half a backward leaves, for torch sets that without telling."""
        for family in self._families:
            for place in family.places:
                if place.parameter.grad is not None:
                    self._adder(family.gradients, place)(place.parameter)

    @torch.no_grad()
    def squared_norm_alone(self, world: Channel) -> float | None:
        """Of dense parameters alone: with context parallelism or experts no rank has a replica's gradients."""
        scenario = self._scenario
        if scenario.dp == 1 or scenario.layout.cp > 1 or len(self._families) > 1:
            return None
        (family,) = self._families
        if family.partial[1] > family.partial[0]:
            return None
        total = torch.zeros((), dtype=torch.float64, device=self._grid.device)
        for place in family.places:
            spec, part = spec_of(place.parameter), family.gradients[place.begin : place.end]
            if _copied(scenario, spec):
                return None
            total += part.dot(part).double() / (self._grid.tp.size if spec.cut is None else 1)
        return float(world.all_reduce(total)) / scenario.dp

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums over the tensor ranks, over the two copies of a tied embedding, and over the replicas."""
        for family in self._families:
            begin, end = family.partial
            if end > begin:
                self._grid.tp.all_reduce(family.gradients[begin:end])
            begin, end = family.words
            if end > begin:
                self._grid["embedding"].all_reduce(family.gradients[begin:end])
            if family.zero == 0:
                family.channel.all_reduce(family.gradients)
                family.owned.gradient = family.gradients
            else:
                family.owned.gradient = family.channel.reduce_scatter(family.gradients)

    @torch.no_grad()
    def publish(self) -> None:
        """The new weights, from all ranks that updated them."""
        for family in self._families:
            mine = family.weights[family.mine]
            if self._dtype != torch.float32:
                mine.copy_(family.owned.master)
            if family.zero and family.channel.size > 1:
                family.weights.copy_(family.channel.all_gather(mine.clone()))
            family.owned.gradient = None

    @torch.no_grad()
    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Each parameter's values and moments; ZeRO-1's parts are gathered, one buffer at a time."""
        found: dict[str, torch.Tensor] = {}
        for family in self._families:
            for part, values in _parts_of(family.owned, optimizer).items():
                whole = family.channel.all_gather(values) if family.zero else values
                for place in family.places:
                    view = whole[place.begin : place.end].view_as(place.parameter)
                    found[f"{part}.{spec_of(place.parameter).name}"] = _placed(view, place.whole)
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies into the buffers, of which this rank keeps its part."""
        for family in self._families:
            parts = _parts_of(family.owned, optimizer)
            for part in PARTS:
                whole = torch.zeros(family.weights.numel(), dtype=torch.float32, device=self._grid.device)
                for place in family.places:
                    values = local(state[f"{part}.{spec_of(place.parameter).name}"])
                    whole[place.begin : place.end].copy_(values.flatten())
                parts[part].copy_(whole[family.mine])
                if part == "weight":
                    family.weights.copy_(whole)

    def bytes_held(self) -> dict[str, float]:
        """Weights as computed with, and gradients in fp32."""
        return {
            "parameters": float(sum(family.size * family.weights.element_size() for family in self._families)),
            "gradients": float(sum(family.size * family.gradients.element_size() for family in self._families)),
        }


@dataclass(frozen=True)
class _Whole:
    """The tensor that a rank's part belongs to, without values."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Whole | None:
        """That of a DTensor; None where this rank has all of it."""
        if not isinstance(parameter, DTensor):
            return None
        return cls(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def _placed(values: torch.Tensor, whole: _Whole | None) -> torch.Tensor:
    """A part as what knows the whole."""
    if whole is None:
        return values
    return DTensor.from_local(
        values, whole.mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride
    )


def _parts_of(owned: Owned, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The values that this rank updates, and their moments, which are made where no step has yet."""
    held = next(
        p for group in optimizer.param_groups for p in group["params"] if p.data_ptr() == owned.master.data_ptr()
    )
    state = optimizer.state[held]
    for name in PARTS[1:]:
        if name not in state:
            state[name] = torch.zeros_like(held)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=held.device)
    return {"weight": owned.master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


# --- torch's DistributedDataParallel ----------------------------------------------------------------------------------


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
            for part, values in _parts_of(owned, optimizer).items()
        }

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies in place."""
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            for part, values in _parts_of(owned, optimizer).items():
                values.copy_(local(state[f"{part}.{spec_of(parameter).name}"]))

    def bytes_held(self) -> dict[str, float]:
        """All in fp32."""
        size = float(sum(parameter.numel() * 4 for parameter in self._parameters))
        return {"parameters": size, "gradients": size}


# --- ZeRO 2 and 3 -----------------------------------------------------------------------------------------------------


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
            specs = {id(parameter): spec_of(parameter) for parameter in stage.parameters()}
            order = [specs[id(parameter)] for parameter in stage.parameters()]
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
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    self._log(module)
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
        return across * self._copies.size * (2 if _copied(self.scenario, spec) else 1)

    def _units(self) -> Iterator[FSDPModule]:
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    yield module

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
            for module in stage.modules():
                if isinstance(module, FSDPModule):
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
            if _copied(self.scenario, spec_of(parameter)):
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
            for part, values in _parts_of(owned, optimizer).items():
                found[f"{part}.{spec_of(parameter).name}"] = _placed(
                    values.view_as(_shard(parameter)), _Whole.of(parameter)
                )
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies in place."""
        for owned, parameter in zip(self.owned, self._parameters, strict=True):
            for part, values in _parts_of(owned, optimizer).items():
                values.copy_(local(state[f"{part}.{spec_of(parameter).name}"]))

    def bytes_held(self) -> dict[str, float]:
        """Shards in fp32; below fp32 the weights that stay are the optimizer's."""
        size = float(sum(owned.master.numel() * 4 for owned in self.owned))
        return {"parameters": size if self.dtype == torch.float32 else 0.0, "gradients": size}


def _shard(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard."""
    return local(parameter.detach())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard of the gradient; an expert that no token came to has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
