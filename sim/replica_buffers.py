"""The buffers that replicas exchange once a step, in the order in which they travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..scenarios.scenario import Scenario
from ..topology.placement import Placement
from . import shards

Ints = npt.NDArray[np.int64]
Group = Literal["dp", "edp", "shard", "hybrid"]


@dataclass(frozen=True)
class ReplicaBuffer:
    """One buffer of each pipeline rank.

    Attributes:
        group: Who exchanges it.
        op: How.
        bytes: Of each pipeline rank.
    """

    group: Group
    op: str
    bytes: tuple[float, ...]


def after_backward(scenario: Scenario) -> tuple[ReplicaBuffer, ...]:
    """The gradients."""
    sizes = tuple(shards.reduce_bytes(scenario, count) for count in shards.stage_parameters(scenario))
    return (ReplicaBuffer("dp", shards.reduce_op(scenario), sizes),)


def after_optimizer(scenario: Scenario) -> tuple[ReplicaBuffer, ...]:
    """The new weights, where ZeRO shards the optimizer."""
    sizes = tuple(shards.gather_bytes(scenario, count) for count in shards.stage_parameters(scenario))
    return (ReplicaBuffer("dp", "all_gather", sizes),)


def replica_groups_of(placement: Placement, scenario: Scenario, group: str) -> Ints:
    """Devices of all groups of a kind, stage by stage."""
    return placement.data_groups()
