"""Which device each rank runs on: the order of ranks, the devices of a node, the nodes of the job.

Ranks are numbered as Megatron-LM and DeepSpeed number them: tensor parallel
varies fastest, then the replicas (context parallel, then data parallel), and the
pipeline stage slowest. A scenario may say another order. Expert-parallel groups lie
within the tensor ranks and replicas of a stage. Ranks fill the nodes of the job in order, rank ``i`` of a node on
device ``i`` unless the scenario says which: on Frontier a task's local rank is not
its GCD's number unless it is bound so.

Source of the rank order: Megatron-LM, megatron/core/parallel_state.py
(``initialize_model_parallel``, default order "tp-cp-ep-dp-pp"); DeepSpeed,
runtime/pipe/topology.py (``PipeModelDataParallelTopology``, axes pipe, data, model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .errors import InputError, Problem, nearest
from .fabrics import Dragonfly, FatTree, Torus, UserGraph
from .faults import Fault
from .machine import Machine
from .placement_spec import DEFAULT_ORDER, FIELD, ORDERS, PlacementSpec, read_node_file
from .routing import Routes

Ranks = npt.NDArray[np.int64]

__all__ = ["ORDERS", "Placement", "PlacementSpec", "build_placement", "crossings", "group_words", "read_node_file"]


@dataclass(frozen=True)
class Placement:
    """The ranks of a job on its devices.

    Attributes:
        tp: Tensor-parallel degree.
        dp: Replicas: data-parallel times context-parallel degree, the context varying faster.
        pp: Pipeline stages.
        devices_per_node: Devices of a node; a device's number is ``node * devices_per_node + local``,
            nodes counted within the job.
        order: What varies fastest first.
        device_order: Device of each local rank; itself where not said.
        node_list: Machine node of each of the job's nodes; the first ones where not said.
        shape: The job's own torus, on a machine that is one.
    """

    tp: int
    dp: int
    pp: int
    devices_per_node: int
    order: str = DEFAULT_ORDER
    device_order: tuple[int, ...] | None = None
    node_list: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the job, one a device."""
        return self.tp * self.dp * self.pp

    @property
    def nodes(self) -> int:
        """Nodes of the job; the last may be partly used."""
        return -(-self.ranks // self.devices_per_node)

    @cached_property
    def node_ids(self) -> Ranks:
        """Machine node of each of the job's nodes."""
        if self.node_list is not None:
            return np.array(self.node_list, dtype=np.int64)
        return np.arange(self.nodes, dtype=np.int64)

    def grid(self) -> Ranks:
        """Device of each rank, shape (pp, dp, tp).

        >>> Placement(tp=2, dp=3, pp=2, devices_per_node=8).grid()[1].tolist()
        [[6, 7], [8, 9], [10, 11]]
        >>> Placement(tp=2, dp=3, pp=2, devices_per_node=8, order="tp-pp-dp").grid()[1].tolist()
        [[2, 3], [6, 7], [10, 11]]
        """
        ranks = np.arange(self.ranks, dtype=np.int64)
        if self.device_order is not None:
            local = np.array(self.device_order, dtype=np.int64)
            ranks = ranks - ranks % self.devices_per_node + local[ranks % self.devices_per_node]
        slowest_first = self.order.split("-")[::-1]
        degree = {"tp": self.tp, "dp": self.dp, "pp": self.pp}
        placed = ranks.reshape([degree[axis] for axis in slowest_first])
        return placed.transpose([slowest_first.index(axis) for axis in ("pp", "dp", "tp")])

    def tensor_groups(self) -> Ranks:
        """Devices of every tensor-parallel group, shape (groups, tp)."""
        return self.grid().reshape(-1, self.tp)

    def data_groups(self) -> Ranks:
        """Devices of every data-parallel group, stage by stage, shape (pp x tp, dp)."""
        return np.swapaxes(self.grid(), 1, 2).reshape(-1, self.dp)

    def replica_groups(self, size: int, stride: int = 1) -> Ranks:
        """Devices of groups of replicas, stage by stage, shape (pp x tp x dp/size, size).

        Args:
            size: Members of a group.
            stride: Distance of its members, in replicas.

        >>> Placement(tp=1, dp=4, pp=1, devices_per_node=8).replica_groups(2).tolist()
        [[0, 1], [2, 3]]
        >>> Placement(tp=1, dp=4, pp=1, devices_per_node=8).replica_groups(2, stride=2).tolist()
        [[0, 2], [1, 3]]
        """
        replicas = self.data_groups().reshape(self.pp * self.tp, -1, size, stride)
        return np.swapaxes(replicas, 2, 3).reshape(-1, size)

    def expert_tensor_groups(self, etp: int) -> Ranks:
        """Devices of the groups that an expert's matrices are cut over, stage by stage, shape (groups, etp).

        >>> Placement(tp=4, dp=1, pp=1, devices_per_node=8).expert_tensor_groups(2).tolist()
        [[0, 1], [2, 3]]
        """
        return self.grid().reshape(-1, etp)

    def expert_groups(self, ep: int, etp: int) -> Ranks:
        """Devices of every expert-parallel group, stage by stage, shape (groups, ep).

        The ranks of a stage, tensor ranks varying fastest, are numbered anew: the expert's tensor
        rank fastest, then the expert-parallel rank, then the copies of the experts. With ``etp`` equal
        to ``tp`` these are groups of neighbouring replicas.

        Args:
            ep: Ranks that the experts are spread over.
            etp: Tensor-parallel degree of the experts; ``ep x etp`` divides ``tp x dp``.

        Source: Megatron-LM, megatron/core/parallel_state.py (``expert_decoder_rank_generator``).

        >>> Placement(tp=2, dp=4, pp=1, devices_per_node=8).expert_groups(ep=2, etp=2).tolist()
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> Placement(tp=2, dp=4, pp=1, devices_per_node=8).expert_groups(ep=4, etp=1).tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        return np.swapaxes(self.grid().reshape(-1, ep, etp), 1, 2).reshape(-1, ep)

    def expert_data_groups(self, ep: int, etp: int) -> Ranks:
        """Devices that hold the same experts, stage by stage, shape (groups, tp x dp / (ep x etp)).

        >>> Placement(tp=2, dp=4, pp=1, devices_per_node=8).expert_data_groups(ep=4, etp=1).tolist()
        [[0, 4], [1, 5], [2, 6], [3, 7]]
        """
        copies = self.grid().reshape(self.pp, -1, ep * etp)
        return np.swapaxes(copies, 1, 2).reshape(-1, copies.shape[1])

    def pipeline_groups(self) -> Ranks:
        """Devices of every pipeline, shape (groups, pp)."""
        return self.grid().reshape(self.pp, -1).T

    def tensor_group_crosses_nodes(self) -> bool:
        """Whether some tensor-parallel group leaves its node."""
        nodes = self.tensor_groups() // self.devices_per_node
        return bool((nodes != nodes[:, :1]).any())

    def routes(self, machine: Machine, faults: Sequence[Fault] = (), non_minimal: float | None = None) -> Routes:
        """The links of the job, and the ways between its devices; `Routes` says what the arguments are."""
        return Routes(machine, self.nodes, self.node_list, self.shape, tuple(faults), non_minimal)


def build_placement(spec: PlacementSpec, machine: Machine, tp: int, dp: int, pp: int) -> Placement:
    """The placement that a scenario asks for.

    Args:
        spec: What it asks.
        machine: Where it runs.
        tp: Tensor-parallel degree.
        dp: Replicas, data-parallel times context-parallel degree.
        pp: Pipeline stages.

    Raises:
        InputError: With everything that is wrong, and what would be right.
    """
    ranks, per_node = tp * dp * pp, machine.devices_per_node
    nodes = -(-ranks // per_node)
    problems = list(_problems(spec, machine, ranks))
    if problems:
        raise InputError("", problems)
    spec = spec.with_nodes_read()
    order, device_order = spec.order, spec.device_order
    if device_order == tuple(range(per_node)):
        device_order = None
    node_list: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    problems = []
    fabric = machine.fabric
    if isinstance(spec.nodes, tuple):
        problems += _list_problems(spec.nodes, machine, nodes)
        node_list = spec.nodes
    elif spec.nodes == "spread":
        node_list, problem = _spread(machine, nodes, spec.groups)
        problems += [problem] if problem else []
    elif isinstance(fabric, Torus):
        shape = spec.shape or fabric.job_shape(nodes)
        wrong = fabric.shape_problem(shape, nodes)
        if wrong is None:
            node_list = tuple(fabric.job_nodes(shape).tolist())
        elif spec.shape is not None:
            near = ", ".join("x".join(map(str, known)) for known in fabric.nearest_shapes(nodes, shape))
            problems.append(Problem(f"{FIELD}.shape", f"{wrong}; nearest: {near or 'none for so many nodes'}"))
    if problems:
        raise InputError("", problems)
    return Placement(tp, dp, pp, per_node, order, device_order, node_list, shape)


def _problems(spec: PlacementSpec, machine: Machine, ranks: int) -> Iterator[Problem]:
    """What can be told before nodes are looked for."""
    if spec.order not in ORDERS:
        yield Problem(f"{FIELD}.order", f"unknown order {spec.order!r}{nearest(spec.order, ORDERS)}")
    per_node, words = machine.devices_per_node, machine.device.words
    if spec.device_order is not None and sorted(spec.device_order) != list(range(per_node)):
        message = (
            f"has to name each of the {per_node} {words} of a node once, 0 to {per_node - 1}, "
            f"but is {_shown(spec.device_order)}"
        )
        yield Problem(f"{FIELD}.device_order", message)
    if ranks > machine.device_count:
        yield Problem(
            FIELD, f"{ranks} ranks are more than the {machine.device_count} {words} of {machine.name}, one a rank"
        )
    if spec.groups is not None and spec.nodes != "spread":
        yield Problem(f"{FIELD}.groups", "goes with nodes: spread")
    if spec.shape is not None:
        if not isinstance(machine.fabric, Torus):
            yield Problem(f"{FIELD}.shape", f"is for a torus; the fabric of {machine.name} is a {machine.fabric.kind}")
        elif spec.nodes != "contiguous" or spec.node_file:
            yield Problem(f"{FIELD}.shape", "is for contiguous nodes; a list of nodes has no torus of its own")


def _list_problems(listed: tuple[int, ...], machine: Machine, nodes: int) -> Iterator[Problem]:
    """What is wrong with a list of nodes."""
    field = f"{FIELD}.nodes"
    outside = [node for node in listed if node >= machine.node_count]
    if outside:
        message = f"{machine.name} has nodes 0 to {machine.node_count - 1}, and no {_shown(outside)}"
        yield Problem(field, message)
    once, first = np.unique(np.array(listed, dtype=np.int64), return_index=True)
    if len(once) < len(listed):
        twice = sorted({listed[i] for i in range(len(listed)) if i not in set(first.tolist())})
        yield Problem(field, f"{_shown(twice)} {'stands' if len(twice) == 1 else 'stand'} more than once")
    if len(listed) != nodes:
        per_node = machine.devices_per_node
        message = (
            f"lists {len(listed)} nodes, but the ranks fill {nodes} of {per_node} {machine.device.words}; "
            f"list {nodes}, or run {len(listed) * per_node} ranks"
        )
        yield Problem(field, message)


def _spread(machine: Machine, nodes: int, asked: int | None) -> tuple[tuple[int, ...] | None, Problem | None]:
    """Nodes shared out evenly among groups, in the machine's order, as a scheduler lists them."""
    fabric = machine.fabric
    if isinstance(fabric, Torus):
        message = "spread goes over groups of switches, which a torus has none of; it can be contiguous, or a list"
        return None, Problem(f"{FIELD}.nodes", message)
    group = fabric.groups_of(np.arange(machine.node_count, dtype=np.int64))
    ids = np.arange(machine.node_count, dtype=np.int64)[np.argsort(group, kind="stable")]
    sizes = np.bincount(group)
    word, words = group_words(machine)
    count = min(asked or len(sizes), nodes)
    if asked is not None and asked > len(sizes):
        return None, Problem(f"{FIELD}.groups", f"{asked} is more than the {len(sizes)} {words} of {machine.name}")
    if asked is not None and asked > nodes:
        return None, Problem(f"{FIELD}.groups", f"{nodes} nodes cannot be spread over {asked} {words}; at most {nodes}")
    if sizes[:count].sum() < nodes:
        fewest = int(np.searchsorted(np.cumsum(sizes), nodes)) + 1
        message = f"{count} {word if count == 1 else words} hold {sizes[:count].sum()} nodes, but the job has {nodes}"
        return None, Problem(f"{FIELD}.groups", f"{message}; at least {fewest}")
    share = _even_shares(sizes[:count], nodes)
    starts = np.cumsum(sizes) - sizes
    chosen = np.concatenate([ids[start : start + take] for start, take in zip(starts, share, strict=False)])
    return tuple(chosen.tolist()), None


def _even_shares(room: Ranks, nodes: int) -> Ranks:
    """Nodes from each group, as even as their room allows."""
    share = np.zeros(len(room), dtype=np.int64)
    while (left := nodes - int(share.sum())) > 0:
        open_groups = np.flatnonzero(share < room)
        more = np.full(len(open_groups), left // len(open_groups))
        more[: left % len(open_groups)] += 1
        share[open_groups] = np.minimum(share[open_groups] + more, room[open_groups])
    return share


def group_words(machine: Machine) -> tuple[str, str]:
    """What a set of nodes behind the same switches is called, one and several."""
    fabric = machine.fabric
    if isinstance(fabric, Dragonfly):
        return "dragonfly group", "dragonfly groups"
    if isinstance(fabric, FatTree):
        return "leaf", "leaves"
    return "switch", "switches"


def crossings(placement: Placement, machine: Machine, cp: int = 1, ep: int = 1, etp: int | None = None) -> list[str]:
    """Which groups of ranks leave a node, and how far they reach; a sentence each.

    Args:
        placement: Where the ranks are.
        machine: What they run on.
        cp: Context-parallel degree.
        ep: Expert-parallel degree.
        etp: Tensor-parallel degree of the experts; left out: that of the placement.

    >>> from .machine import load_machine
    >>> crossings(Placement(tp=8, dp=6, pp=64, devices_per_node=8), load_machine("frontier"))[0]
    'data-parallel groups span 6 nodes and 1 to 2 dragonfly groups'
    """
    kinds = {
        "tensor-parallel groups": placement.tensor_groups(),
        "data-parallel groups": placement.replica_groups(placement.dp // cp, cp),
        "context-parallel groups": placement.replica_groups(cp),
        "expert-parallel groups": placement.expert_groups(ep, etp or placement.tp),
        "pipelines": placement.pipeline_groups(),
    }
    fabric = machine.fabric
    sentences = []
    for name, groups in kinds.items():
        nodes = groups // placement.devices_per_node
        spans = _distinct(nodes)
        if machine.devices_per_node == 1 and groups.shape[1] == 1:
            continue
        if spans.max() == 1:
            continue
        parts = [_range(spans, "node", "nodes")]
        if isinstance(fabric, (Dragonfly, FatTree, UserGraph)):
            far = _distinct(fabric.groups_of(placement.node_ids)[nodes])
            parts.append(_range(far, *group_words(machine)))
        sentences.append(f"{name} span {' and '.join(parts)}")
    return sentences


def _distinct(rows: Ranks) -> Ranks:
    """How many different numbers each row holds."""
    ordered = np.sort(rows, axis=1)
    distinct: Ranks = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return distinct


def _range(counts: Ranks, one: str, several: str) -> str:
    least, most = int(counts.min()), int(counts.max())
    shown = f"{most}" if least == most else f"{least} to {most}"
    return f"{shown} {one if most == 1 else several}"


def _shown(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"{shown} and {len(numbers) - most} more" if len(numbers) > most else shown
