"""Who a rank is: its place in the layout, the device mesh, and the groups that it talks in.

Ranks are numbered as the scenario's placement says: by default the tensor ranks are neighbours, then the
context-parallel ranks, then the replicas, then the stages. Groups are those that the simulation plays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..scenarios.scenario import Scenario
from .comm import Channel, CommLog


@dataclass(frozen=True)
class Place:
    """Where one rank stands: its number along each axis of the layout."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int


@dataclass
class Phase:
    """Which half of a backward runs: ``both``, or with a zero-bubble schedule ``input`` or ``weight`` alone.

    A product that gathers its input again for the gradient of its weight does so in the second half only.
    """

    half: str = "both"


@dataclass
class Grid:
    """One rank's place and groups.

    Attributes:
        place: Where this rank stands.
        device: What it computes on.
        log: What it sends.
        mesh: (pp, replicate, shard, tp); parameters lie on its parts. None in a run of one rank on its own.
        expert_mesh: (pp, edp, ep, etp), for the experts' parameters.
        channels: By kind of group: tp, cp, dp, shard, hybrid, ep, etp, edp, pp, embedding, world.
        phase: Of the backward under way.
        sequence_parallel: Whether the stream is cut over the tensor ranks.
    """

    place: Place
    device: torch.device
    log: CommLog
    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None
    channels: dict[str, Channel]
    phase: Phase = field(default_factory=Phase)
    sequence_parallel: bool = False

    def __getitem__(self, kind: str) -> Channel:
        return self.channels[kind]

    @property
    def tp(self) -> Channel:
        """The tensor group."""
        return self.channels["tp"]


def rank_table(scenario: Scenario) -> np.ndarray:
    """Global ranks by place, shape (pp, dp, cp, tp)."""
    layout = scenario.layout
    sizes = {"pp": layout.pp, "dp": scenario.dp * layout.cp, "tp": layout.tp}
    slowest_first = scenario.placement.order.split("-")[::-1]
    ranks = np.arange(scenario.devices).reshape([sizes[axis] for axis in slowest_first])
    ranks = ranks.transpose([slowest_first.index(axis) for axis in ("pp", "dp", "tp")])
    return ranks.reshape(layout.pp, scenario.dp, layout.cp, layout.tp)


def place_of(scenario: Scenario, rank: int) -> Place:
    """Where a rank stands."""
    pp, dp, cp, tp = (int(axis[0]) for axis in np.nonzero(rank_table(scenario) == rank))
    return Place(rank, pp, dp, cp, tp)


def group_tables(scenario: Scenario) -> dict[str, np.ndarray]:
    """The members of every group, one group a row, by kind; kinds of one rank a group included.

    As `exatwin.topology.placement.Placement` groups the devices of a prediction.
    """
    layout = scenario.layout
    ranks = rank_table(scenario)  # pp, dp, cp, tp
    pp, replicas, tp = layout.pp, scenario.dp * layout.cp, layout.tp
    flat = ranks.reshape(pp, replicas, tp)
    shard = layout.shard_group or replicas
    etp = layout.etp or tp
    expert = ranks.reshape(pp, -1, layout.ep, etp)  # the expert's tensor rank fastest, then ep, then the copies
    first, last = scenario.embedding_ranks
    return {
        "world": ranks.reshape(1, -1),
        "tp": ranks.reshape(-1, tp),
        "cp": ranks.transpose(0, 1, 3, 2).reshape(-1, layout.cp),
        "dp": flat.transpose(0, 2, 1).reshape(-1, replicas),
        "shard": flat.reshape(pp, -1, shard, tp).transpose(0, 1, 3, 2).reshape(-1, shard),
        "hybrid": flat.reshape(pp, -1, shard, tp).transpose(0, 2, 3, 1).reshape(-1, replicas // shard),
        "etp": expert.reshape(-1, etp),
        "ep": expert.transpose(0, 1, 3, 2).reshape(-1, layout.ep),
        "edp": expert.transpose(0, 2, 3, 1).reshape(-1, expert.shape[1]),
        "pp": ranks.reshape(pp, -1).T,
        "embedding": np.stack([ranks[first].ravel(), ranks[last].ravel()], axis=1)
        if first != last
        else ranks.reshape(-1, 1),
    }


def stages_of(scenario: Scenario, pp_rank: int) -> list[int]:
    """The virtual stages of a pipeline rank, in the order of its chunks."""
    layout = scenario.layout
    if layout.vpp == 1:
        return [pp_rank]
    return [scenario.schedule.stage_of(pp_rank, chunk, layout.pp) for chunk in range(layout.vpp)]


def build_grid(scenario: Scenario, rank: int, device: torch.device, log: CommLog) -> Grid:
    """The place, mesh and groups of a rank; every rank of the job calls it, for groups are made together."""
    layout = scenario.layout
    tables = group_tables(scenario)
    alone = not dist.is_initialized()
    made: dict[tuple[tuple[int, ...], ...], Any] = {}
    channels = {
        kind: _channel(kind, [tuple(int(r) for r in row) for row in table], rank, log, made)
        for kind, table in tables.items()
    }
    if (layout.etp or layout.tp) == layout.tp:
        channels["etp"] = channels["tp"]  # the same ranks, and the name that a prediction has for them
    shard = layout.shard_group or scenario.dp * layout.cp
    ranks = torch.from_numpy(rank_table(scenario).copy())
    etp = layout.etp or layout.tp
    mesh = expert_mesh = None
    if not alone:
        mesh = DeviceMesh(
            device.type,
            ranks.reshape(layout.pp, -1, shard, layout.tp),
            mesh_dim_names=("pp", "replicate", "shard", "tp"),
        )
        if scenario.model.is_moe:
            expert_mesh = DeviceMesh(
                device.type, ranks.reshape(layout.pp, -1, layout.ep, etp), mesh_dim_names=("pp", "edp", "ep", "etp")
            )
    return Grid(
        place_of(scenario, rank),
        device,
        log,
        mesh,
        expert_mesh,
        channels,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
    )


def _channel(
    kind: str, rows: Sequence[tuple[int, ...]], rank: int, log: CommLog, made: dict[tuple[tuple[int, ...], ...], Any]
) -> Channel:
    """This rank's group of a kind; kinds with the same groups share torch's process groups."""
    mine = next((row for row in rows if rank in row), (rank,))
    key = tuple(rows)
    if len(mine) == 1 and all(len(row) == 1 for row in rows):
        return Channel(kind, mine, 0, None, log)
    if key not in made:
        if len(rows) == 1 and len(rows[0]) == dist.get_world_size():
            made[key] = dist.group.WORLD
        else:
            made[key], _ = dist.new_subgroups_by_enumeration([list(row) for row in rows])
    return Channel(kind, mine, mine.index(rank), made[key], log)
