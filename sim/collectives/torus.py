"""Collectives on the job's own torus: several trees at once, one for each axis, and the offload of small ones.

The buffer is cut in as many parts as the torus has axes. Part k goes along the axes in the
order k, k + 1, ...: along the first axis in every line to a plane, along the next in that
plane to a line, along the last to the part's root; a broadcast is the same backwards. Both
ways round each ring are used, so a line of L nodes is at most ``L // 2`` steps deep. The
roots of the parts lie apart, so that two parts at most share a link.

Source: Adachi et al. 2012, "The design of ultra scalable MPI collective communication on the K computer", Computer
Science - Research and Development 28, 147-155, doi 10.1007/s00450-012-0211-7; Matsumoto et al., SACSIS 2012
(Trinaryx on the K computer: three pipelined trees over several interfaces at once); Fujitsu,
MPI user's guide for Fugaku, 8.3 (trinaryx3, its segments) and 6.12 (Tofu barrier). Which trees
the library builds is not published in full; these are ours in that manner.
"""

from __future__ import annotations

import math

import numpy as np

from .shape import Collective, GroupShape, Ints, Phase, Schedule, Transfer, pairs

KIB = 1024


def segment_bytes(size_bytes: float) -> float:
    """Pieces of the pipeline: the decision file that De Sensi et al. publish for 33 to 3,840 processes.

    Source: HLC-Lab/bine_trees_fugaku, fjmpi-dectree.conf.

    >>> [segment_bytes(size) for size in (2**17, 2**20, 2**24)]
    [4096, 16384, 65536]
    """
    if size_bytes <= 393_216:
        return 4 * KIB
    return 16 * KIB if size_bytes <= 6_291_456 else 64 * KIB


def tree_to_root(shape: tuple[int, ...], first: int) -> tuple[Ints, Ints]:
    """Parent of each node in the tree of one part, and its depth; the root's parent is itself.

    >>> tree_to_root((4,), 0)
    (array([0, 0, 1, 0]), array([0, 1, 2, 1]))
    """
    count = math.prod(shape)
    number = np.arange(count)
    stride = np.cumprod((1, *shape[:-1]))
    at = [number // int(s) % length for s, length in zip(stride, shape, strict=True)]
    root = [min(first, length - 1) for length in shape]
    parent, depth = number.copy(), np.zeros(count, dtype=np.int64)
    moved = np.zeros(count, dtype=bool)
    for turn in range(len(shape)):
        axis = (first + turn) % len(shape)
        length = shape[axis]
        offset = (at[axis] - root[axis]) % length
        backwards = offset <= length // 2
        depth += np.where(backwards, offset, length - offset)
        here = ~moved & (offset > 0)
        following = (at[axis] + np.where(backwards, -1, 1)) % length
        parent[here] += ((following - at[axis]) * int(stride[axis]))[here]
        moved |= here
    return parent, depth


def _axes(group: GroupShape) -> tuple[int, ...]:
    assert group.torus is not None
    return tuple(length for length in group.torus if length > 1) or (1,)


def _trees(group: GroupShape) -> tuple[Ints, int]:
    """Edges child to parent of all parts between the first members of the nodes, and the parts."""
    shape, q = _axes(group), group.members_per_node
    edges = []
    for part in range(len(shape)):
        parent, _ = tree_to_root(shape, part)
        child = np.flatnonzero(parent != np.arange(len(parent)))
        edges.append(pairs(child, parent[child]) * q)
    return np.concatenate(edges), len(shape)


def _chains(group: GroupShape) -> Ints:
    """Edges between processes of one node, towards the first of them."""
    member = np.arange(group.ranks)
    member = member[member % group.members_per_node > 0]
    return pairs(member, member - 1)


def _segment(size_bytes: float, group: GroupShape) -> float:
    """Bytes that a tree hands on at once: a segment, or all of a part that is smaller."""
    return min(segment_bytes(size_bytes), size_bytes / len(_axes(group)))


def _depth(group: GroupShape) -> int:
    return sum(length // 2 for length in _axes(group))


def _gather_rounds(group: GroupShape) -> list[tuple[Transfer, ...]]:
    """Chains to the first members, then all trees level by level, adding."""
    shape, q = _axes(group), group.members_per_node
    every = tuple(range(len(shape)))
    rounds = [
        tuple(Transfer(n * q + i, n * q + i - 1, every, add=True) for n in range(group.nodes))
        for i in range(q - 1, 0, -1)
    ]
    trees = [tree_to_root(shape, part) for part in range(len(shape))]
    levels = range(max(int(depth.max()) for _, depth in trees), 0, -1)
    rounds += [
        tuple(
            Transfer(int(child) * q, int(parent[child]) * q, (part,), add=True)
            for part, (parent, depth) in enumerate(trees)
            for child in np.flatnonzero(depth == level)
        )
        for level in levels
    ]
    return rounds


def _backwards(rounds: list[tuple[Transfer, ...]]) -> list[tuple[Transfer, ...]]:
    return [tuple(Transfer(t.target, t.source, t.blocks) for t in sends) for sends in reversed(rounds)]


class _Torus(Collective):
    name = "torus"

    def refuses(self, group: GroupShape) -> str:
        """Needs the whole job on a torus."""
        if group.torus is None:
            return "its members do not fill a torus"
        return "" if group.even else "its nodes hold different numbers of members"


class TorusAllReduce(_Torus):
    """Up the trees with adding, and down again, in segments so that all edges work at once."""

    op = "all_reduce"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase of ``2 (q - 1) + 2 sum(L // 2)`` steps."""
        if group.ranks == 1:
            return ()
        piece = _segment(size_bytes, group)
        trees, parts = _trees(group)
        chains = _chains(group)
        edges = np.concatenate([trees, trees[:, ::-1], chains, chains[:, ::-1]])
        share = np.concatenate([np.full(2 * len(trees), 1 / parts), np.ones(2 * len(chains))])
        return (
            Phase(
                edges,
                size_bytes,
                inside_steps=2.0 * (group.members_per_node - 1),
                across_steps=2.0 * _depth(group),
                share=share,
                message=True,
                step_bytes=piece,
                segment_bytes=piece,
                reduce_bytes=size_bytes,
            ),
        )

    def schedule(self, group: GroupShape) -> Schedule:
        """One block a part."""
        up = _gather_rounds(group)
        return Schedule(len(_axes(group)), (*up, *_backwards(up)))


class TorusBroadcast(_Torus):
    """Down the trees in segments; the buffer's owner hands each part to its root first.

    The way from the owner to the roots is left out: it is a few steps of the trees' own length.
    """

    op = "broadcast"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase of ``(q - 1) + sum(L // 2)`` steps, after the parts have reached their roots."""
        if group.ranks == 1:
            return ()
        piece = _segment(size_bytes, group)
        trees, parts = _trees(group)
        chains = _chains(group)
        roots = _roots(group)
        moved = roots[roots > 0]
        edges = np.concatenate([pairs(np.zeros_like(moved), moved), trees[:, ::-1], chains[:, ::-1]])
        share = np.concatenate([np.full(len(moved) + len(trees), 1 / parts), np.ones(len(chains))])
        return (
            Phase(
                edges,
                size_bytes,
                inside_steps=float(group.members_per_node - 1),
                across_steps=float(_depth(group) + (len(moved) > 0)),
                share=share,
                message=True,
                step_bytes=piece,
                segment_bytes=piece,
            ),
        )

    def schedule(self, group: GroupShape) -> Schedule:
        """One block a part, from member 0."""
        start = tuple(Transfer(0, int(root), (part,)) for part, root in enumerate(_roots(group)) if root)
        down = _backwards(_gather_rounds(group))
        return Schedule(len(_axes(group)), (*((start,) if start else ()), *down))


def _roots(group: GroupShape) -> Ints:
    """The member at the root of each part's tree."""
    shape = _axes(group)
    roots = [int(np.flatnonzero(tree_to_root(shape, part)[1] == 0)[0]) for part in range(len(shape))]
    return np.array(roots, dtype=np.int64) * group.members_per_node


class TorusAllGather(_Torus):
    """Rings along the axes one after the other, each part in its own order, at each place of a node; then in the node.

    A process copies every byte of the result once, out of the interfaces' buffers or its neighbours' memory.
    """

    op = "all_gather"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase an axis, all parts at once, and one in the node."""
        if group.ranks == 1:
            return ()
        q, shape = group.members_per_node, _axes(group)
        phases = []
        held = [size_bytes / group.ranks / len(shape)] * len(shape)
        for turn in range(len(shape) if group.nodes > 1 else 0):
            edges, carried = [], []
            for part in range(len(shape)):
                axis = (part + turn) % len(shape)
                ring = _axis_ring(shape, axis)
                every = (ring[np.newaxis] * q + np.arange(q)[:, np.newaxis, np.newaxis]).reshape(-1, 2)
                edges.append(every)
                carried.append(np.full(len(every), held[part] * (shape[axis] - 1)))
                held[part] *= shape[axis]
            share = np.concatenate(carried)
            most = float(share.max())
            steps = float(max(shape) - 1)
            copied = float(sum(part[0] for part in carried))
            phases.append(
                Phase(
                    np.concatenate(edges),
                    most,
                    across_steps=steps,
                    share=share / most,
                    message=True,
                    step_bytes=most / steps,
                    reduce_bytes=copied,
                    overlapped=True,
                )
            )
        if q > 1:
            inner = (q - 1) / q * size_bytes
            phases.append(
                Phase("node_rings", inner, inside_steps=q - 1, step_bytes=inner / (q - 1), reduce_bytes=inner)
            )
        return tuple(phases)

    def schedule(self, group: GroupShape) -> Schedule:
        """Block ``i D + k`` is part k of member i's shard."""
        q, shape = group.members_per_node, _axes(group)
        parts, nodes = len(shape), group.nodes
        held = [[[node] for node in range(nodes)] for _ in range(parts)]
        rounds: list[tuple[Transfer, ...]] = []
        for turn in range(parts if nodes > 1 else 0):
            streams = []
            for part in range(parts):
                axis = (part + turn) % parts
                following = {int(a): int(b) for a, b in _axis_ring(shape, axis)}
                moving = {node: list(held[part][node]) for node in range(nodes)}
                stream = []
                for _ in range(shape[axis] - 1):
                    stream.append([(a, b, part, tuple(moving[a])) for a, b in following.items()])
                    moving = {b: moving[a] for a, b in following.items()}
                    for node in range(nodes):
                        held[part][node] = held[part][node] + moving[node]
                streams.append(stream)
            for r in range(max(map(len, streams))):
                sends = [send for stream in streams if r < len(stream) for send in stream[r]]
                rounds.append(
                    tuple(
                        Transfer(a * q + place, b * q + place, tuple((n * q + place) * parts + part for n in origin))
                        for a, b, part, origin in sends
                        for place in range(q)
                    )
                )
        rounds += [
            tuple(
                Transfer(
                    node * q + place,
                    node * q + (place + 1) % q,
                    tuple((n * q + (place - r) % q) * parts + part for n in range(nodes) for part in range(parts)),
                )
                for node in range(nodes)
                for place in range(q)
            )
            for r in range(q - 1)
        ]
        return Schedule(group.ranks * parts, tuple(rounds))


def _axis_ring(shape: tuple[int, ...], axis: int) -> Ints:
    """Edges from each node to the next along an axis."""
    number = np.arange(math.prod(shape))
    stride = math.prod(shape[:axis])
    at = number // stride % shape[axis]
    return pairs(number, number + ((at + 1) % shape[axis] - at) * stride)


class _Offload(_Torus):
    """One tree, walked by the interfaces themselves; the processes of a node meet in memory."""

    name = "offload"
    in_network = True
    _up = True

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase; its steps are taken by the gates."""
        if group.ranks == 1:
            return ()
        parent, _ = tree_to_root(_axes(group), 0)
        child = np.flatnonzero(parent != np.arange(len(parent)))
        up = np.concatenate([pairs(child, parent[child]) * group.members_per_node, _chains(group)])
        edges = np.concatenate([up, up[:, ::-1]]) if self._up else up[:, ::-1]
        return (Phase(edges, size_bytes, gate_steps=2.0 * max(_depth(group), 1), message=True),)

    def schedule(self, group: GroupShape) -> Schedule:
        """One block."""
        one = [tuple(t._replace(blocks=(0,)) for t in sends if t.blocks[0] == 0) for sends in _gather_rounds(group)]
        return Schedule(1, (*(one if self._up else ()), *_backwards(one)))


class OffloadAllReduce(_Offload):
    """Up and down: a few elements only, since a gate holds no more."""

    op = "all_reduce"


class OffloadBroadcast(_Offload):
    """A barrier that carries the value: up and down, though only the way down carries bytes."""

    op = "broadcast"
    _up = False
