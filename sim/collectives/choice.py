"""Which algorithm a library takes, by operation, size and group; or the one that was named.

Source: NCCL, src/graph/tuning.cc, and RCCL's copy of it: every pair of algorithm and protocol
gets a time, latency plus bytes over bandwidth, and the least wins. Here the figures are those
that the calibration has, not the library's own. Fujitsu MPI: its decision file for Fugaku as
HLC-Lab/bine_trees_fugaku publishes it (fjmpi-dectree.conf), and MPI user's guide, 6.12 and 8.3.
oneCCL: developer guide 2021.13, environment variables: on device buffers the default is topo, in the node, then across.
gloo: GitHub pytorch/gloo, allreduce.cc (the ring is its default), allgather.cc, broadcast.cc and alltoall.cc.
MPICH: Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521, section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...topology.errors import input_error, nearest
from ..calibration import NetworkFigures, Protocol
from . import COLLECTIVES
from .shape import Collective, GroupShape, Phase

KIB = 1024
SIMPLE = "simple"


@dataclass(frozen=True)
class Candidate:
    """One way to run a collective, and what the choice reckoned for it; None where nothing was reckoned."""

    algorithm: str
    protocol: str
    seconds: float | None = None


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        collective: The algorithm.
        protocol: None for the plain one.
        reason: For people: the rule, or that the user named it.
        candidates: All that were reckoned, the best first.
    """

    collective: Collective
    protocol: Protocol | None
    reason: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self.collective.name

    @property
    def protocol_name(self) -> str:
        """Name of the protocol."""
        return self.protocol.name if self.protocol else SIMPLE


def algorithms(op: str) -> list[str]:
    """Names of the algorithms of an operation."""
    return [name for known, name in COLLECTIVES if known == op]


def _known(op: str) -> None:
    if not algorithms(op):
        known = list(dict.fromkeys(operation for operation, _ in COLLECTIVES))
        raise input_error(f"no collective is called {op!r}{nearest(op, known)}", field="collective")


def find_collective(op: str, algorithm: str) -> Collective:
    """The algorithm of that name.

    Raises:
        InputError: If the operation or the algorithm is unknown; it names the nearest.
    """
    _known(op)
    if (op, algorithm) not in COLLECTIVES:
        raise input_error(
            f"{op} has no algorithm {algorithm!r}{nearest(algorithm, algorithms(op))}", field="collective.algorithm"
        )
    return COLLECTIVES[op, algorithm]


def choose(
    op: str,
    size_bytes: float,
    group: GroupShape,
    figures: NetworkFigures,
    *,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> Choice:
    """The algorithm and protocol for one call.

    Args:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``all_to_all``, ``send``, ``sendrecv``
            or ``exchange``.
        size_bytes: The whole buffer, as each algorithm counts it.
        group: Whom it runs on.
        figures: What the library achieves; its name decides how it chooses.
        algorithm: Name of the one to take, in place of the library's choice.
        protocol: Likewise.

    Raises:
        InputError: If a name is unknown, or the named algorithm cannot run on the group.
    """
    named = _named_protocol(protocol, figures)
    if algorithm is not None:
        collective = find_collective(op, algorithm)
        why_not = collective.refuses(group)
        if why_not:
            fit = [name for name in algorithms(op) if not COLLECTIVES[op, name].refuses(group)]
            raise input_error(
                f"{algorithm} cannot run here: {why_not}; {', '.join(fit)} can", field="collective.algorithm"
            )
        return _least(op, size_bytes, group, figures, [algorithm], named, "named")
    _known(op)
    if figures.library in ("NCCL", "RCCL"):
        names = [name for name in _NCCL.get(op, ("direct",)) if not COLLECTIVES[op, name].refuses(group)]
        if figures.switch is None:
            names = [name for name in names if not COLLECTIVES[op, name].in_network]
        return _least(op, size_bytes, group, figures, names, named, f"least of {figures.library}'s model")
    if figures.library == "oneCCL" and (op, "hierarchical") in COLLECTIVES:
        names = ["hierarchical"] if not COLLECTIVES[op, "hierarchical"].refuses(group) else ["ring"]
        return _least(op, size_bytes, group, figures, names, named, "oneCCL's topo: inside the node, then across")
    if figures.library == "gloo" and op in _GLOO:
        return Choice(COLLECTIVES[op, _GLOO[op]], None, "gloo's default")
    name, rule = (_fujitsu if figures.library == "Fujitsu MPI" else _mpich)(op, size_bytes, group, figures)
    return Choice(COLLECTIVES[op, name], None, rule)


_NCCL = {
    "all_reduce": ("ring", "tree", "nvls", "nvls_tree"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("ring",),
}

_GLOO = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "broadcast": "binomial",
    "all_to_all": "direct",
}


def _named_protocol(name: str | None, figures: NetworkFigures) -> tuple[Protocol | None, ...]:
    ways: dict[str, Protocol | None] = {SIMPLE: None, **{one.name: one for one in figures.protocols}}
    if name is None:
        return tuple(ways.values())
    if name not in ways:
        raise input_error(
            f"{figures.library} has no protocol {name!r} here{nearest(name, ways)}", field="collective.protocol"
        )
    return (ways[name],)


def _least(
    op: str,
    size_bytes: float,
    group: GroupShape,
    figures: NetworkFigures,
    names: list[str],
    protocols: tuple[Protocol | None, ...],
    reason: str,
) -> Choice:
    reckoned: list[tuple[float, Collective, Protocol | None]] = []
    for name in names:
        collective = COLLECTIVES[op, name]
        phases = collective.phases(size_bytes, group)
        for protocol in (None,) if collective.in_network else protocols:
            seconds = sum(_reckoned_s(phase, group, figures, protocol) for phase in phases)
            reckoned.append((seconds, collective, protocol))
    reckoned.sort(key=lambda one: one[0])
    _, collective, protocol = reckoned[0]
    shown = tuple(Candidate(c.name, p.name if p else SIMPLE, s) for s, c, p in reckoned)
    return Choice(collective, protocol, reason, shown)


def pipelined_s(transfer_s: float, fill_s: float) -> float:
    """Seconds of a transfer that is cut into the best number of pieces.

    With k pieces, each with an overhead a, over a pipeline of s stages a transfer of T takes
    ``(s - 1 + k)(a + T / k)``; the best k makes ``T + 2 sqrt(f T)`` of it and a constant, ``f = (s - 1) a``.

    Source: any text on pipelined broadcast, such as Chan et al. 2007, doi 10.1002/cpe.1206.

    >>> pipelined_s(100e-6, 1e-6)
    0.00012
    """
    return transfer_s + 2 * math.sqrt(fill_s * transfer_s)


def fill_s(figures: NetworkFigures, protocol: Protocol | None, *, across: bool) -> float:
    """Fill of the pipeline of pieces.

    Inside a node only the plain protocol hands pieces over one by one; the others carry their flags in the data.
    Over the fabric every piece waits for the port.
    """
    if across and figures.fabric_fill:
        return figures.fabric_fill.value
    return figures.fill.value if figures.fill and protocol is None else 0.0


def latency_s(phase: Phase, figures: NetworkFigures, protocol: Protocol | None) -> float:
    """Latency of one round of a phase's steps, with the library's fixed figures."""
    inside = protocol.node_hop.value if protocol else figures.node_hop.value
    across = protocol.fabric_hop.value if protocol else figures.fabric_hop.value
    switch = figures.switch.hop.value if figures.switch else 0.0
    gate = figures.gates.hop.value if figures.gates else 0.0
    return (
        phase.inside_steps * inside
        + phase.across_steps * across
        + phase.switch_steps * switch
        + phase.gate_steps * gate
    )


def _reckoned_s(phase: Phase, group: GroupShape, figures: NetworkFigures, protocol: Protocol | None) -> float:
    inside_s, across_s = 0.0, 0.0
    if not isinstance(phase.edges, str):
        inside_s, across_s = _loads_s(phase, group, figures)
    elif phase.edges == "rail_rings":
        across_s = phase.edge_bytes * group.members_per_node / group.across_bytes_per_s
    else:
        inside_s = phase.edge_bytes / group.inside_bytes_per_s if group.members_per_node != 1 else 0.0
        across_s = phase.edge_bytes / group.across_bytes_per_s if group.nodes > 1 and phase.edges == "ring" else 0.0
    moving = max(inside_s, across_s) / (protocol.share.value if protocol else 1.0)
    fill = fill_s(figures, protocol, across=across_s > 0)
    return (latency_s(phase, figures, protocol) + pipelined_s(moving, fill)) * phase.repeat


def _loads_s(phase: Phase, group: GroupShape, figures: NetworkFigures) -> tuple[float, float]:
    edges = phase.edge_list(group)
    carried = phase.edge_bytes * (np.ones(len(edges)) if phase.share is None else phase.share)
    q = max(group.members_per_node, 1)
    source, target = edges[:, 0], edges[:, 1]
    switched = (source >= group.ranks) | (target >= group.ranks)
    rate = group.inside_bytes_per_s
    switch_rate = group.switch_bytes_per_s * (figures.switch.share.value if figures.switch else 1.0)
    within = switched | (source // q == target // q)
    out = np.bincount(source[within & ~switched], weights=carried[within & ~switched], minlength=1) / rate
    busiest = float(out.max(initial=0.0))
    up = switched & (source < group.ranks)
    trips = np.bincount(source[up], weights=carried[up], minlength=1)
    busiest = max(busiest, float(trips.max(initial=0.0)) / switch_rate)
    leaving = np.bincount(source[~within] // q, weights=carried[~within], minlength=1)
    return busiest, float(leaving.max(initial=0.0)) / group.across_bytes_per_s


def _fujitsu(op: str, size: float, group: GroupShape, figures: NetworkFigures) -> tuple[str, str]:
    p = group.ranks
    on_torus = not COLLECTIVES["all_reduce", "torus"].refuses(group)
    gated = on_torus and group.nodes >= 4 and figures.gates is not None and size <= figures.gates.most.value
    if op in ("all_reduce", "broadcast") and gated:
        return "offload", "Tofu barrier: few elements, four nodes or more"
    if op == "all_reduce":
        if p <= 32:
            small = size / p < 8 * KIB
            return ("recursive_doubling", "up to 32 ranks, under 8 KiB each") if small else ("ring", "up to 32 ranks")
        switch = 98_304 if p <= 3_840 else 49_152 if p <= 15_360 else 16_384
        if size <= switch:
            return "recursive_doubling", f"up to {switch} bytes on {p} ranks"
        return ("torus", f"above {switch} bytes on {p} ranks") if on_torus else ("ring", "no torus of its own")
    if op == "broadcast":
        if on_torus:
            return "torus", "on a torus of its own"
        return ("binomial", "up to 12 KiB") if size <= 12 * KIB else ("scatter_all_gather", "above 12 KiB")
    if op == "all_gather" and on_torus and size > 512 * KIB:
        return "torus", "above 512 KiB in all, on a torus of its own"
    if op in ("all_gather", "reduce_scatter"):
        return ("bruck", "up to 512 KiB in all") if size <= 512 * KIB else ("ring", "above 512 KiB in all")
    return ("double_spread", "its default") if op == "all_to_all" else ("direct", "one message")


def _mpich(op: str, size: float, group: GroupShape, figures: NetworkFigures) -> tuple[str, str]:
    if op == "all_reduce":
        return ("recursive_doubling", "up to 2 KiB") if size <= 2 * KIB else ("halving_doubling", "above 2 KiB")
    if op == "broadcast":
        return ("binomial", "up to 12 KiB") if size <= 12 * KIB else ("scatter_all_gather", "above 12 KiB")
    if op in ("all_gather", "reduce_scatter"):
        return ("bruck", "up to 512 KiB in all") if size <= 512 * KIB else ("ring", "above 512 KiB in all")
    if op == "all_to_all":
        return ("direct", "up to 32 KiB a message") if size <= 32 * KIB * group.ranks else ("pairwise", "above 32 KiB")
    return "direct", "one message"
