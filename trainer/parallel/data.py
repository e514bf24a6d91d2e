"""Data parallelism: which way a layout names for replicas to share a model.

ZeRO 0 and 1 are `flat`, ZeRO 2 and 3 `sharded`; ZeRO 0 with gradients reduced beside the backward is `distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...scenarios.scenario import Scenario
from ..grid import Grid
from ..model import Stage
from .distributed import DistributedReplicas
from .flat import FlatReplicas
from .replicas import Replicas
from .sharded import ShardedReplicas


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
