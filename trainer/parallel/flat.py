"""ZeRO 0 and 1: weights of a rank in one buffer, their gradients added up in fp32 in another.

Once a step the sum over the replicas is made: an all-reduce, or with ZeRO-1 a reduce-scatter after which each rank
updates its part and the new weights are gathered, as Megatron's distributed optimizer does. torch's
ZeroRedundancyOptimizer makes an all-reduce and a broadcast of it. Experts stand on fewer ranks than the rest, so they
have groups, and buffers, of their own.

Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...scenarios.scenario import Scenario
from ..comm import Channel
from ..grid import Grid
from ..model import Spec, Stage
from .replicas import PARTS, Holder, Owned, Whole, copied, holders_of, parts_of, placed, spec_of
from .tensor import local


@dataclass
class _Place:
    """A parameter in the buffer of its family, and the one that it was made from, which knows the whole."""

    parameter: nn.Parameter
    whole: Whole | None
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
            return 0 if copied(self._scenario, spec) else 1 if spec.cut is not None else 3 if spec.partial else 2

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
            places.append(_Place(made, Whole.of(parameter), at, end))
            if copied(self._scenario, spec):
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
        return across * replicas * (2 if copied(self._scenario, spec) else 1)

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
        """Of dense parameters alone: with context parallelism or experts no rank has a replica's gradients.

        Whether it is known must be the same on every rank, whatever stage it has, for all of them sum.
        """
        scenario = self._scenario
        if scenario.dp == 1 or scenario.layout.cp > 1 or scenario.model.is_moe or scenario.embedding_copied:
            return None
        (family,) = self._families
        if family.partial[1] > family.partial[0]:  # on all ranks or none: every stage has layers
            return None
        total = torch.zeros((), dtype=torch.float64, device=self._grid.device)
        for place in family.places:
            spec, part = spec_of(place.parameter), family.gradients[place.begin : place.end]
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
            for part, values in parts_of(family.owned, optimizer).items():
                whole = family.channel.all_gather(values) if family.zero else values
                for place in family.places:
                    view = whole[place.begin : place.end].view_as(place.parameter)
                    found[f"{part}.{spec_of(place.parameter).name}"] = placed(view, place.whole)
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Copies into the buffers, of which this rank keeps its part."""
        for family in self._families:
            parts = parts_of(family.owned, optimizer)
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
