"""Gradients reduced beside the last backward, weights gathered beside the first forward."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.sim.pieces import Parts, gradient_pieces, weight_pieces
from exatwin.sim.tail import Gate, Piece, slowed_s

from .test_players import (
    PLAYERS,
    SCREEN,
    every_player,
    play_des,
    play_exact,
    play_recurrence,
    program_of,
    same,
    seconds,
    steps,
    tail_of,
    traffic_of,
)


def pieces(layers, chunk=0):
    """The gradients of equal layers, as a backward makes them."""
    return tuple(Piece(chunk, (layer + 1) / layers, 1 / layers) for layer in range(layers))


def needs(layers, chunk=0):
    """The weights of equal layers, as a forward needs them."""
    return tuple(Piece(chunk, layer / layers, 1 / layers) for layer in range(layers))


@pytest.mark.parametrize("play", [*PLAYERS.values(), SCREEN], ids=[*PLAYERS, "screen"])
@pytest.mark.parametrize(("layers", "reduce"), [(1, 3.0), (4, 0.5), (4, 3.0), (4, 8.0), (10, 2.0)])
def test_a_reduction_beside_the_last_backward_hides_all_but_its_ends(play, layers, reduce):
    """It begins after the first of n layers and ends a layer's part after the last, or begins at once and is longer."""
    backward = 4.0
    tail = replace(tail_of(1, reduce=reduce), reduce_pieces=(pieces(layers),))
    played = play(program_of(1, 3, backward=backward), tail, traffic_of(1))
    begun = 3 * 1.0 + 2 * backward
    expected = max(begun + backward + reduce / layers, begun + backward / layers + reduce)
    assert played.tail.step_s == pytest.approx(expected)
    assert played.tail.reduce_s == pytest.approx([reduce])
    assert played.tail.exposed_reduce_s(0) == pytest.approx(expected - begun - backward)


@pytest.mark.parametrize("play", [*PLAYERS.values(), SCREEN], ids=[*PLAYERS, "screen"])
@pytest.mark.parametrize(("layers", "gather"), [(1, 3.0), (4, 0.5), (4, 3.0), (4, 8.0), (10, 2.0)])
def test_weights_gathered_beside_the_first_forward_cost_what_it_cannot_hide(play, layers, gather):
    """The first of n layers has to be there, and the last a layer before the end."""
    forward = 2.0
    tail = replace(tail_of(1, gather=gather), gather_pieces=(needs(layers),))
    played = play(program_of(1, 3, forward=forward), tail, traffic_of(1))
    first = max(gather / layers + forward, gather + forward / layers)
    assert played.tail.step_s == pytest.approx(first + 2 * forward + 3 * 2.0)
    assert played.tail.gather_s == pytest.approx([gather])
    if played.timeline.start[0]:
        assert played.timeline.late(0) + played.timeline.start[0][0] == pytest.approx(first - forward)


@every_player
def test_a_rank_that_waits_for_its_first_forward_gathers_meanwhile(play):
    """Rank 3 begins at 3 s at the earliest, so gathering costs it nothing; rank 0 is 2 s and a third late."""
    tail = replace(tail_of(4, gather=3.0), gather_pieces=(needs(3),) * 4)
    program = program_of(4, 8, forward=1.0)
    late = play(program, tail, traffic_of(4))
    plain = play(program, tail_of(4), traffic_of(4))
    assert late.timeline.start[0][1] == pytest.approx(3.0 + 1.0 / 3)  # the last third of its first forward
    assert late.timeline.late_s[3, 0] == pytest.approx(0.0)
    assert late.tail.step_s - plain.tail.step_s == pytest.approx(2.0 + 1.0 / 3)


@every_player
def test_computing_beside_a_gather_is_slower_while_it_lasts(play):
    """Four layers of 1 s; the weights come at 0.9, 1.8, 2.7 and 3.6 s, so that two layers take 1.5 s."""
    tail = replace(tail_of(1, gather=3.6), gather_pieces=(needs(4),), slowdown=1.5)
    step_s = play(program_of(1, 1, forward=4.0), tail, traffic_of(1)).tail.step_s
    assert step_s == pytest.approx(0.9 + 1.5 + 1.5 + 1.0 + 1.0 + 2.0)


def test_reductions_that_overlap_with_a_backward_share_links_as_others_do():
    """Two ranks, one link of 1 byte/s: each would reduce 2 pieces of 1 byte from the middle of its last backward on."""
    rows = traffic_of(2, [{}, {}, {0: 1.0}, {0: 1.0}, {}], (1.0,))
    tail = replace(tail_of(2, reduce=2.0), reduce_pieces=(pieces(2), pieces(2)))
    for play in (play_des, play_exact):
        played = play(program_of(2, 1, backward=4.0), tail, rows)
        # Rank 1 makes its pieces at 4 and 6 s, rank 0 at 8 and 10 s: nothing meets.
        assert played.tail.reduce_s == pytest.approx([2.0, 2.0])
        assert played.tail.step_s == pytest.approx(11.0)
        longer = play(program_of(2, 1, backward=4.0), replace(tail, reduce=tail_of(2, reduce=12.0).reduce), rows)
        # Rank 1 has 6 bytes from 4 s on and 6 more; rank 0 joins at 8 s with 6, and 6 more: 24 bytes in all.
        assert longer.tail.step_s == pytest.approx(4.0 + 24.0)


def test_weights_of_several_ranks_share_links_while_they_are_gathered():
    rows = traffic_of(2, [{}, {}, {0: 1.0}, {0: 1.0}, {}], (1.0,))
    tail = replace(tail_of(2, gather=4.0), gather_pieces=(needs(1), needs(1)))
    alone = play_recurrence(program_of(2, 1), tail, rows).tail
    for play in (play_des, play_exact):
        played = play(program_of(2, 1), tail, rows).tail
        assert alone.gather_s == pytest.approx([4.0, 4.0])
        assert played.gather_s == pytest.approx([8.0, 8.0])


# The players against each other


@st.composite
def overlapping(draw):
    """A step with pieces of its own on every rank, and last backwards that take longer."""
    program, tail = draw(steps())

    def cuts(rank, last):
        count = draw(st.integers(1, 4))
        at = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=count, max_size=count)))
        return [*at[:-1], 1.0] if last else [0.0, *at[1:]]

    reduces, gathers = [], []
    for rank in range(program.ranks):
        chunks = range(program.chunks)
        order = sorted(chunks, key=lambda chunk: program.finals[rank][chunk])
        made = [(chunk, at) for chunk in order for at in cuts(rank, last=True)]
        due = [(chunk, at) for chunk in chunks for at in cuts(rank, last=False)]
        reduces.append(tuple(Piece(chunk, at, 1 / len(made)) for chunk, at in made))
        gathers.append(tuple(Piece(chunk, at, 1 / len(due)) for chunk, at in due))
    finals = [(rank, program.table[rank][index]) for rank, row in enumerate(program.finals) for index in row]
    extra_s = {key: draw(seconds) for key in finals} if draw(st.booleans()) else {}
    tail = replace(
        tail,
        reduce_pieces=tuple(reduces) if draw(st.booleans()) else (),
        gather_pieces=tuple(gathers) if draw(st.booleans()) else (),
        slowdown=draw(st.sampled_from([1.0, 1.25])),
    )
    return replace(program, extra_s=extra_s), tail


@given(overlapping())
def test_recurrence_and_events_agree_on_what_overlaps_where_nothing_is_shared(step):
    program, tail = step
    quiet = traffic_of(program.ranks)
    exact = play_exact(program, tail, quiet)
    for play in (play_recurrence, play_des):
        other = play(program, tail, quiet)
        assert same(other, exact)
        assert other.tail.reduce_wait_s == pytest.approx(exact.tail.reduce_wait_s, rel=1e-9, abs=1e-9)
        assert other.timeline.late_s == pytest.approx(exact.timeline.late_s, rel=1e-9, abs=1e-9)


@given(overlapping())
def test_what_overlaps_costs_no_more_than_what_follows_where_it_has_no_latency(step):
    program, tail = step
    free = {
        name: tuple(tuple(replace(exchange, latency_s=0.0) for exchange in row) for row in getattr(tail, name))
        for name in ("reduce", "gather")
    }
    tail = replace(tail, **free, slowdown=1.0)
    quiet = traffic_of(program.ranks)
    plain = play_recurrence(program, replace(tail, reduce_pieces=(), gather_pieces=()), quiet).tail
    beside = play_recurrence(program, replace(tail, gather_pieces=()), quiet).tail
    assert beside.step_s <= plain.step_s * (1 + 1e-12)
    for rank, whole in enumerate(plain.reduce_s):
        assert -1e-9 <= beside.exposed_reduce_s(rank) <= whole + 1e-9


# What is made of a model


@given(st.lists(st.builds(Parts, layers=st.integers(1, 9), parameters=st.integers(100, 10**9)), min_size=1, max_size=4))
def test_pieces_are_all_of_a_rank_in_the_order_in_which_they_are_made_or_needed(chunks):
    order = list(range(len(chunks)))[::-1]
    for found, of in ((gradient_pieces(chunks, order), order), (weight_pieces(chunks), order[::-1])):
        assert sum(piece.share for piece in found) == pytest.approx(1.0)
        assert [chunk for chunk, _ in groups(found)] == of
        assert all(a.at <= b.at for a, b in pairwise(found) if a.chunk == b.chunk)
    assert gradient_pieces(chunks, order)[-1].at == 1.0
    assert weight_pieces(chunks)[0].at == 0.0


def groups(found):
    runs = []
    for piece in found:
        if not runs or runs[-1][0] != piece.chunk:
            runs.append((piece.chunk, []))
        runs[-1][1].append(piece)
    return runs


def test_the_head_is_made_first_and_the_embedding_last():
    """A head of 4, two layers of 3 each and an embedding of 5: a backward of ten parts of time."""
    stage = Parts(layers=2, parameters=15, embedding=5, head=4)
    made = gradient_pieces([stage], [0])
    assert [piece.at for piece in made] == pytest.approx([0.4, 0.7, 1.0, 1.0])
    assert [piece.share for piece in made] == pytest.approx([4 / 15, 0.2, 0.2, 1 / 3])
    tied = Parts(layers=2, parameters=11, embedding=5, head=4, own_head=False)
    assert [p.at for p in weight_pieces([tied])] == pytest.approx([0.0, 0.0, 0.3])


@given(st.floats(0.1, 10.0), st.floats(0.0, 5.0), st.integers(1, 6))
def test_a_pass_beside_communication_takes_between_its_time_and_that_slowed(pass_s, comm_s, layers):
    cut = [((layer + 1) / layers, comm_s / layers) for layer in range(layers)]
    assert pass_s * (1 - 1e-9) <= slowed_s(pass_s, cut, 1.2) <= 1.2 * pass_s * (1 + 1e-9)
    assert slowed_s(pass_s, cut, 1.0) == pytest.approx(pass_s)


def test_a_gate_that_is_open_changes_nothing():
    assert Gate((0.0, 0.5), (1.0, 2.0), over_s=2.0, slowdown=1.5).passed(3.0, 4.0) == 7.0
