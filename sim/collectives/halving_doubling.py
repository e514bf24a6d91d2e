"""Recursive doubling, recursive halving and their union: partners at distance 1, 2, 4, ...

A count of ranks that is not a power of two is folded first: of the first ``2 r`` members
(``p = 2^k + r``) every even one hands its buffer to the odd one beside it and sits out.

Source: Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521; Rabenseifner 2004,
doi 10.1007/978-3-540-24685-5_1; for counts that are no power of two in gather and scatter,
Bruck et al. 1997, doi 10.1109/71.642949.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .shape import Collective, GroupShape, Ints, Phase, Schedule, Transfer, step


def _core(ranks: int) -> tuple[int, Ints]:
    """Folded pairs r, and the ``2^k`` members that take part."""
    power = 1 << (ranks.bit_length() - 1)
    folded = ranks - power
    return folded, np.concatenate([np.arange(1, 2 * folded, 2), np.arange(2 * folded, ranks)])


def _fold(size_bytes: float, folded: int, group: GroupShape, *, back: bool) -> tuple[Phase, ...]:
    if not folded:
        return ()
    even = np.arange(0, 2 * folded, 2)
    ends = (even + 1, even) if back else (even, even + 1)
    phase = step(*ends, size_bytes, group)
    return (phase if back else replace(phase, reduce_bytes=size_bytes),)


def _fold_rounds(folded: int, blocks: int) -> tuple[list[tuple[Transfer, ...]], list[tuple[Transfer, ...]]]:
    if not folded:
        return [], []
    every = tuple(range(blocks))
    before = tuple(Transfer(2 * i, 2 * i + 1, every, add=True) for i in range(folded))
    return [before], [tuple(Transfer(t.target, t.source, t.blocks) for t in before)]


class DoublingAllReduce(Collective):
    """Whole buffers exchanged with partners at distance 1, 2, 4, ...: few steps, many bytes."""

    name = "recursive_doubling"
    op = "all_reduce"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase a distance."""
        folded, core = _core(group.ranks)
        if group.ranks == 1:
            return ()
        index = np.arange(len(core))
        exchanges = [
            replace(step(core, core[index ^ (1 << k)], size_bytes, group), reduce_bytes=size_bytes)
            for k in range(len(core).bit_length() - 1)
        ]
        before, after = (_fold(size_bytes, folded, group, back=back) for back in (False, True))
        return (*before, *exchanges, *after)

    def schedule(self, group: GroupShape) -> Schedule:
        """One block."""
        folded, core = _core(group.ranks)
        before, after = _fold_rounds(folded, 1)
        rounds = [
            tuple(Transfer(int(core[i]), int(core[i ^ (1 << k)]), (0,), add=True) for i in range(len(core)))
            for k in range(len(core).bit_length() - 1)
        ]
        return Schedule(1, (*before, *rounds, *after))


class HalvingDoublingAllReduce(Collective):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner)."""

    name = "halving_doubling"
    op = "all_reduce"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """The half of the buffer with the farthest partner first, then a quarter, and back."""
        if group.ranks == 1:
            return ()
        folded, core = _core(group.ranks)
        index = np.arange(len(core))
        halving = []
        distance, part = len(core) // 2, size_bytes / 2
        while distance:
            phase = step(core, core[index ^ distance], part, group)
            halving.append(replace(phase, reduce_bytes=part))
            distance, part = distance // 2, part / 2
        doubling = [replace(phase, reduce_bytes=0.0) for phase in reversed(halving)]
        before, after = (_fold(size_bytes, folded, group, back=back) for back in (False, True))
        return (*before, *halving, *doubling, *after)

    def schedule(self, group: GroupShape) -> Schedule:
        """``2^k`` blocks."""
        folded, core = _core(group.ranks)
        blocks = len(core)
        before, after = _fold_rounds(folded, blocks)
        halving, doubling = [], []
        distance = blocks // 2
        while distance:
            sends, returns = [], []
            for i in range(blocks):
                partner = i ^ distance
                # What is left of the buffer is the run of 2 * distance blocks both lie in; each keeps its own half.
                theirs = partner // distance * distance
                mine = i // distance * distance
                sends.append(Transfer(int(core[i]), int(core[partner]), tuple(range(theirs, theirs + distance)), True))
                returns.append(Transfer(int(core[i]), int(core[partner]), tuple(range(mine, mine + distance))))
            halving.append(tuple(sends))
            doubling.append(tuple(returns))
            distance //= 2
        return Schedule(blocks, (*before, *halving, *reversed(doubling), *after))


class BruckAllGather(Collective):
    """Shards held so far sent to the member 1, 2, 4, ... before; any count of ranks."""

    name = "bruck"
    op = "all_gather"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """``ceil(log2 p)`` phases; the last may be a part."""
        p = group.ranks
        member = np.arange(p)
        phases, distance = [], 1
        while distance < p:
            held = min(distance, p - distance)
            phases.append(step(member, (member - distance) % p, held / p * size_bytes, group))
            distance *= 2
        return tuple(phases)

    def schedule(self, group: GroupShape) -> Schedule:
        """Member i holds blocks i, i + 1, ..."""
        p = group.ranks
        rounds, distance = [], 1
        while distance < p:
            held = min(distance, p - distance)
            rounds.append(
                tuple(Transfer(i, (i - distance) % p, tuple((i + k) % p for k in range(held))) for i in range(p))
            )
            distance *= 2
        return Schedule(p, tuple(rounds))


class BruckReduceScatter(Collective):
    """The all-gather run backwards, adding."""

    name = "bruck"
    op = "reduce_scatter"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """The all-gather's phases, last first, the other way."""
        backwards = []
        for phase in reversed(BruckAllGather().phases(size_bytes, group)):
            edges = phase.edge_list(group)[:, ::-1]
            backwards.append(replace(phase, edges=edges, reduce_bytes=phase.edge_bytes))
        return tuple(backwards)

    def schedule(self, group: GroupShape) -> Schedule:
        """As above."""
        forward = BruckAllGather().schedule(group)
        rounds = [
            tuple(Transfer(t.target, t.source, t.blocks, add=True) for t in sends) for sends in reversed(forward.rounds)
        ]
        return Schedule(forward.blocks, tuple(rounds))
