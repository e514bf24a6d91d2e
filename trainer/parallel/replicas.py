"""What all ways to share a model over replicas have in common: who owns which elements, and what a part is part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ...scenarios.scenario import Scenario
from ..comm import Channel
from ..model import Spec, Stage

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


def copied(scenario: Scenario, spec: Spec) -> bool:
    """Whether a weight is that of a tied embedding which stands on two pipeline ranks."""
    return spec.name == "embedding.words" and scenario.embedding_copied


@dataclass(frozen=True)
class Whole:
    """The tensor that a rank's part belongs to, without values."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Whole | None:
        """That of a DTensor; None where this rank has all of it."""
        if not isinstance(parameter, DTensor):
            return None
        return cls(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def placed(values: torch.Tensor, whole: Whole | None) -> torch.Tensor:
    """A part as what knows the whole."""
    if whole is None:
        return values
    return DTensor.from_local(
        values, whole.mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride
    )


def parts_of(owned: Owned, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The values that this rank updates, and their moments, which are made where no step has yet."""
    held = owned.held
    state = optimizer.state[held]
    for name in PARTS[1:]:
        if name not in state:
            state[name] = torch.zeros_like(held)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=held.device)
    return {"weight": owned.master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
