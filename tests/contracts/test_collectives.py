"""What every collective in the table must keep to, whoever wrote it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exatwin.sim.collectives import COLLECTIVES, GroupShape

TABLE = sorted(COLLECTIVES)
GROUPS = [
    GroupShape(2),
    GroupShape(3, switched=True),
    GroupShape(8, switched=True),
    GroupShape(5, 5),
    GroupShape(16, 16, torus=(4, 2, 2)),
    GroupShape(6, 3, 2, switched=True),
    GroupShape(12, 3, 4, torus=(3, 1, 1)),
    GroupShape(24, 6, 4, torus=(3, 2, 1)),
    GroupShape(27, 27, 1, torus=(3, 3, 3)),
    GroupShape(60, 60, 1, torus=(5, 4, 3)),
    GroupShape(8, 8, 1, torus=(2, 2, 2)),
    GroupShape(32, 4, 8, switched=True),
    GroupShape(7, 2, 0),
]
CASES = [
    pytest.param(key, group, id=f"{key[0]}-{key[1]}-{group.ranks}on{group.nodes}")
    for key in TABLE
    for group in GROUPS
    if not COLLECTIVES[key].refuses(group) and not (key[0] == "send" and group.ranks > 2)
]


def least_bytes(op, ranks, in_network):
    """Bytes that must cross edges in all, of a buffer of 1."""
    if op == "send":
        return 1
    if op in ("sendrecv", "exchange"):
        return ranks
    if op == "all_reduce":
        return ranks - 1 if in_network else 2 * (ranks - 1)
    return ranks - 1


def start(op, ranks, blocks):
    """What each member holds: for each block, whose contributions."""
    held = [[Counter() for _ in range(blocks)] for _ in range(2 * ranks)]
    for member in range(ranks):
        for block in range(blocks):
            if op in ("all_reduce", "reduce_scatter"):
                mine = True
            elif op in ("broadcast", "send"):
                mine = member == 0
            elif op == "all_to_all":
                mine = block // ranks == member
            else:
                mine = block * ranks // blocks == member
            if mine:
                held[member][block][member] = 1
    return held


def expected(op, ranks, member, block, blocks):
    """Contributions that a member must hold in the end; None where it does not matter."""
    everyone = Counter(range(ranks))
    if op == "all_reduce":
        return everyone
    if op == "reduce_scatter":
        return everyone if block == member else None
    if op in ("broadcast", "send"):
        return Counter([0])
    if op == "all_gather":
        return Counter([block * ranks // blocks])
    if op == "all_to_all":
        return Counter([block // ranks]) if block % ranks == member else None
    neighbours = {(member - 1) % ranks} | ({(member + 1) % ranks} if op == "exchange" else set())
    return Counter([block]) if block in neighbours else None


def play(op, ranks, schedule):
    held = start(op, ranks, schedule.blocks)
    for sends in schedule.rounds:
        arriving = [(t, [Counter(held[t.source][b]) for b in t.blocks]) for t in sends]
        for transfer, contents in arriving:
            for block, content in zip(transfer.blocks, contents, strict=True):
                assert content, f"{transfer} sends a block that its source does not hold"
                if transfer.add:
                    held[transfer.target][block] = held[transfer.target][block] + content
                else:
                    held[transfer.target][block] = content
    return held


@pytest.mark.parametrize(("key", "group"), CASES)
def test_the_right_data_arrives_everywhere(key, group):
    op = key[0]
    schedule = COLLECTIVES[key].schedule(group)
    held = play(op, group.ranks, schedule)
    for member in range(group.ranks):
        for block in range(schedule.blocks):
            want = expected(op, group.ranks, member, block, schedule.blocks)
            assert want is None or held[member][block] == want, (member, block, held[member][block])


@pytest.mark.parametrize(("key", "group"), CASES)
def test_phases_carry_what_the_schedule_sends(key, group):
    collective = COLLECTIVES[key]
    size = 5040.0 * 128
    sent = Counter()
    schedule = collective.schedule(group)
    block = size / group.ranks / group.ranks * group.ranks / schedule.blocks * group.ranks
    if key[0] == "all_to_all":
        block = size / group.ranks
    if key[0] in ("sendrecv", "exchange"):
        block = size
    for sends in schedule.rounds:
        for transfer in sends:
            sent[transfer.source, transfer.target] += len(transfer.blocks) * block
    carried = Counter()
    for phase in collective.phases(size, group):
        for index, (a, b) in enumerate(phase.edge_list(group).tolist()):
            share = 1.0 if phase.share is None else phase.share[index]
            carried[a, b] += phase.edge_bytes * share * phase.repeat
    if key[0] == "all_to_all" and group.ranks > 48:
        assert carried.total() == pytest.approx(sent.total())  # some partners stand for all
        return
    if key == ("broadcast", "ring") and group.ranks > 1:
        del carried[group.ranks - 1, 0]  # the edge back to the root is counted though it is idle
    assert dict(carried) == pytest.approx(dict(sent))


@pytest.mark.parametrize(("key", "group"), CASES)
def test_no_fewer_bytes_move_than_must(key, group):
    collective = COLLECTIVES[key]
    moved = sum(phase.total_bytes(group) for phase in collective.phases(1.0, group))
    assert moved >= least_bytes(key[0], group.ranks, collective.in_network) * (1 - 1e-9)


@pytest.mark.parametrize("key", TABLE)
def test_one_rank_moves_nothing(key):
    collective = COLLECTIVES[key]
    alone = GroupShape(1, torus=(1, 1, 1))
    assert collective.phases(1e6, alone) == ()
    assert collective.shape(1e6, 1).edge_bytes == 0


@pytest.mark.parametrize("key", TABLE)
@given(size=st.floats(1, 1e12), more=st.floats(1, 1e3), which=st.integers(0, len(GROUPS) - 1))
@settings(max_examples=15, deadline=None)
def test_more_bytes_take_no_fewer(key, size, more, which):
    collective, group = COLLECTIVES[key], GROUPS[which]
    if collective.refuses(group):
        return

    def loads(size_bytes):
        return [(p.edge_bytes * p.repeat, p.steps) for p in collective.phases(size_bytes, group)]

    small, large = loads(size), loads(size * more)
    assert len(small) == len(large)
    for (few, steps), (many, as_many) in zip(small, large, strict=True):
        assert many >= few * (1 - 1e-12)
        assert steps == as_many


@pytest.mark.parametrize("key", TABLE)
def test_an_algorithm_says_where_its_method_comes_from(key):
    module = __import__(type(COLLECTIVES[key]).__module__, fromlist=["__doc__"])
    assert type(COLLECTIVES[key]).__doc__
    text = f"{module.__doc__}{type(COLLECTIVES[key]).__doc__}"
    assert "doi" in text or "Source" in text
