"""Schedules against the closed forms of their papers, and the table's text form."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exatwin.scenarios.schedules import (
    SCHEDULES,
    FileSchedule,
    check_table,
    durations,
    from_csv,
    in_flight,
    load_schedule,
    makespan,
    schedule_table,
    start_times,
    to_csv,
)
from exatwin.topology.errors import InputError

ranks_and_micro_batches = given(ranks=st.integers(1, 9), micro_batches=st.integers(1, 20))
ranks_and_rounds = given(ranks=st.integers(1, 8), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
seconds = st.integers(1, 8).map(float)  # whole, so that sums are exact


def idle_s(table, ranks, micro_batches, chunks, **times):
    """What a step takes beyond the work of a rank."""
    work_s = micro_batches * chunks * (times["forward_s"] + times["backward_s"])
    return makespan(table, **times) - work_s


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 4), (4, 4), (8, 32), (4, 2)])
def test_pipeline_fills_and_drains_once(name, ranks, micro_batches):
    """With free messages a step is (m + p - 1) slots of forward plus backward: Narayanan et al. 2021, 2.2.1."""
    table = schedule_table(SCHEDULES[name], ranks, micro_batches)
    assert makespan(table, 1.0, 2.0) == pytest.approx((micro_batches + ranks - 1) * 3.0)


@ranks_and_micro_batches
def test_a_rank_of_1f1b_holds_as_many_micro_batches_as_ranks_follow(ranks, micro_batches):
    table = schedule_table(SCHEDULES["1f1b"], ranks, micro_batches)
    assert [in_flight(row) for row in table] == [min(micro_batches, ranks - rank) for rank in range(ranks)]


@ranks_and_micro_batches
def test_a_rank_of_gpipe_holds_them_all(ranks, micro_batches):
    table = schedule_table(SCHEDULES["gpipe"], ranks, micro_batches)
    assert {in_flight(row) for row in table} == {micro_batches}


@ranks_and_rounds
def test_interleaving_divides_the_bubble_by_the_chunks(ranks, rounds, chunks):
    """(p - 1) (f + b) / v, where a rank's work forward and back is f and b: Narayanan et al. 2021, 2.2.2."""
    for name in ("interleaved", "1f1b", "gpipe"):
        table = schedule_table(SCHEDULES[name], ranks, ranks * rounds, chunks)
        whole = {"forward_s": 1.0 / chunks, "backward_s": 2.0 / chunks}
        assert idle_s(table, ranks, ranks * rounds, chunks, **whole) == pytest.approx((ranks - 1) * 3.0 / chunks)


@ranks_and_rounds
def test_an_interleaved_step_runs_in_megatrons_order(ranks, rounds, chunks):
    """Warm-up and rounds as Narayanan et al. 2021, figure 4, and Megatron-LM, for a multiple of p micro-batches."""
    micro_batches = ranks * rounds
    by_rounds = [
        (chunk, i)
        for first in range(0, micro_batches, ranks)
        for chunk in range(chunks)
        for i in range(first, first + ranks)
    ]
    for rank, row in enumerate(schedule_table(SCHEDULES["interleaved"], ranks, micro_batches, chunks)):
        ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(by_rounds))
        assert "".join(action.kind for action in row).startswith("F" * ahead)
        forwards = [(a.stage, a.micro_batch) for a in row if a.kind == "F"]
        backwards = [(a.stage, a.micro_batch) for a in row if a.kind == "B"]
        assert forwards == [(chunk * ranks + rank, i) for chunk, i in by_rounds]
        assert backwards == [((chunks - 1 - chunk) * ranks + rank, i) for chunk, i in by_rounds]
        assert in_flight(row) == min(ahead + 1, len(by_rounds))


def test_interleaved_1f1b_is_1f1b_with_chunks():
    assert schedule_table(SCHEDULES["1f1b"], 4, 8, 2) == schedule_table(SCHEDULES["interleaved"], 4, 8)


@given(ranks=st.integers(1, 8), more=st.integers(0, 12), forward=seconds, to_input=seconds, to_weight=seconds)
def test_the_bubble_of_zb_h1_is_shorter_by_two_weight_gradients_a_rank(ranks, more, forward, to_input, to_weight):
    """(p - 1) (f + b - w): Qi et al. 2023, Table 2, where f >= w lets weight gradients fill in, and b >= w."""
    to_weight = min(forward, to_input, to_weight)
    micro_batches = 2 * ranks + more
    table = schedule_table(SCHEDULES["zb-h1"], ranks, micro_batches)
    times = {"forward_s": forward, "backward_s": to_input + to_weight, "input_s": to_input}
    assert idle_s(table, ranks, micro_batches, 1, **times) == (ranks - 1) * (forward + to_input - to_weight)


@ranks_and_micro_batches
def test_zb_h1_needs_the_memory_of_the_first_rank_of_1f1b(ranks, micro_batches):
    first = in_flight(schedule_table(SCHEDULES["1f1b"], ranks, micro_batches)[0])
    assert {in_flight(row) for row in schedule_table(SCHEDULES["zb-h1"], ranks, micro_batches)} == {first}


@given(ranks=st.integers(1, 8), more=st.integers(0, 12), unit=seconds)
def test_a_rank_of_zb_v_never_waits_where_its_passes_are_alike(ranks, more, unit):
    """Qi et al. 2024, section 4: zero bubble, 2 p passes of half a rank held, the memory of 1F1B's first rank."""
    micro_batches = 2 * ranks - 1 + more
    table = schedule_table(SCHEDULES["zb-v"], ranks, micro_batches)
    starts = start_times(table, durations(unit, 2 * unit))
    assert all(b - a == unit for row in starts for a, b in pairwise(row))
    assert [row[0] for row in starts] == [rank * unit for rank in range(ranks)]
    assert {in_flight(row) for row in table} == {2 * ranks}


@given(ranks=st.integers(1, 8), more=st.integers(0, 12), unit=seconds)
def test_the_bubble_of_dualpipe_v_is_a_forward_a_rank_where_pairs_follow_each_other(ranks, more, unit):
    micro_batches = 2 * ranks + more
    table = schedule_table(SCHEDULES["dualpipe-v"], ranks, micro_batches)
    times = {"forward_s": unit, "backward_s": 2 * unit}
    assert idle_s(table, ranks, micro_batches, 2, **times) == (ranks - 1) * unit
    assert {in_flight(row) for row in table} == {2 * ranks + 1}


@given(ranks=st.integers(1, 6), more=st.integers(0, 8), unit=seconds, hidden=st.integers(0, 3))
def test_the_bubble_of_dualpipe_v_is_that_of_its_authors_where_a_pair_is_one_piece(ranks, more, unit, hidden):
    """(PP / 2 - 1) (F&B + B - 3 W), with PP / 2 ranks here: GitHub deepseek-ai/DualPipe, README."""
    micro_batches = 2 * ranks + more
    pair = 3 * unit - hidden * unit / 4
    step_s = paired_makespan(ranks, micro_batches, {"F": unit, "B": 2 * unit, "I": unit, "W": unit}, pair)
    last_rank_pairs = 2 * (micro_batches - ranks) - 1  # its first pair is not played as one
    busy_s = micro_batches * 6 * unit - last_rank_pairs * (3 * unit - pair)
    assert step_s - busy_s == pytest.approx((ranks - 1) * (pair + 2 * unit - 3 * unit))


def paired_makespan(ranks, micro_batches, seconds, pair_s):
    """Seconds of DualPipe-V where the two passes of a pair take their messages in and give them out together."""
    cells = [
        paired(rank, ranks, micro_batches, row)
        for rank, row in enumerate(schedule_table(SCHEDULES["dualpipe-v"], ranks, micro_batches))
    ]
    ended, clock = {}, [0.0] * ranks
    while any(cells):
        for rank in range(ranks):
            while cells[rank]:
                cell = cells[rank][0]
                needs = [need for action in cell for need in inputs(action, 2 * ranks - 1)]
                if any(need not in ended for need in needs):
                    break
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = start + (pair_s if len(cell) == 2 else seconds[cell[0].kind])
                for kind, stage, micro_batch in cell:
                    ended["F" if kind == "F" else kind.replace("B", "I"), stage, micro_batch] = clock[rank]
                cells[rank].pop(0)
    return max(clock)


def paired(rank, ranks, micro_batches, row):
    """A rank's cells; torch's OVERLAP_F_B joins each forward to the backward after it, once both directions run."""
    below, main = ranks - rank - 1, micro_batches - 2 * ranks + rank + 1
    before = 2 * below + 2 * (rank + 1) + 3 * below
    alone = 2 if rank == ranks - 1 else 0
    turns = [1] * (before + alone) + [2] * (2 * main - alone // 2) + [1, 2] * below
    turns += [1] * (len(row) - sum(turns))
    ends = [sum(turns[:i]) for i in range(len(turns) + 1)]
    return [row[a:b] for a, b in pairwise(ends)]


def inputs(action, last):
    kind, stage, micro_batch = action
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    return [("F", stage, micro_batch)] + ([("I", stage + 1, micro_batch)] if stage < last else [])


def test_halves_of_a_backward_may_take_different_times():
    assert durations(1.0, 3.0, input_s=2.0) == {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
    assert durations(1.0, 3.0, weight_s=1.0) == {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}


def test_idle_slots_of_a_table_are_left_out():
    assert from_csv("0F0,,,0B0\n,1F0,1B0\n") == schedule_table(SCHEDULES["gpipe"], 2, 1)


def test_passes_that_torch_runs_together_are_read_one_after_the_other():
    text = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,( 1F1 ; 0B0 )OVERLAP_F_B,1I1,0I1,1W1,0W1\n"
    assert to_csv(from_csv(text)) == "0F0,1F0,0F1,1B0,1F1,0B0,1I1,0I1,1W1,0W1\n"


def test_cells_for_messages_are_left_to_who_plays_the_table():
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert to_csv(from_csv(text)) == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no action"),
        ("0F0\n", "1 are missing"),
        ("0F0,0B0,0B0\n", "0B0 stands twice"),
        ("0B0,0F0\n", "never ends"),
        ("0F0,0W0,0I0\n", "never ends: rank 0 before 0W0"),
        ("0F0,0I0\n", "0W0 is missing"),
        ("0F0,0W0\n", "0I0 is missing"),
        ("0F0,0I0,0W0,0B0\n", "whole or in two halves"),
        ("0F0,0X0\n", "kind X"),
        ("0F0,hello\n", "is no action"),
        ("0F0,0B\n", "is no action"),
        ("(0F0;hello)OVERLAP_F_B,0B0\n", "'hello' is no action"),
        ("(0F0;0B0)TOGETHER\n", "is no action"),
        ("0F0,0B99999999\n", "counts too far"),
        ('"0F0\n', "not CSV"),
        ("0F0,1B0\n1F0,0B0\n", "stage 1 lives on rank 0"),
    ],
)
def test_a_table_that_cannot_be_played_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        from_csv(text)


@given(st.text(alphabet='01FBIW(;)OVERLAP_F_B,\n "x', max_size=60))
@example("(0F0;0B0)OVERLAP_F_B")
def test_any_text_is_a_table_or_is_refused(text):
    try:
        table = from_csv(text)
    except InputError:
        return
    assert from_csv(to_csv(table)) == table
    try:
        schedule = FileSchedule("mine.csv", table)
    except InputError:
        return
    assert schedule_table(schedule, *schedule.shape) == table


def test_the_names_in_the_table_are_those_of_the_schedules():
    assert {name: schedule.name for name, schedule in SCHEDULES.items()} == {name: name for name in SCHEDULES}


def test_a_schedule_is_had_by_its_name_or_its_file(tmp_path):
    assert load_schedule("zb-h1") is SCHEDULES["zb-h1"]
    path = tmp_path / "mine.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    mine = load_schedule(str(path))
    assert mine.name == str(path)
    assert (mine.shape, mine.chunks, mine.splits_backward) == ((2, 1), (2,), False)
    assert [mine.home(stage, 2, 2) for stage in range(4)] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    check_table(schedule_table(mine, 2, 1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zb-h3", "did you mean zb-h1?; or give a .csv file"),
        ("nowhere.csv", "nowhere.csv: no such file"),
        ("~nobody-here/x.csv", "cannot be read"),
        ("x" * 300 + ".csv", "cannot be read"),
    ],
)
def test_a_schedule_that_is_not_there_is_one_clear_error(name, said):
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        load_schedule(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "3 stages on 2 ranks"),
        ("1F0,1B0\n0F0,0B0\n", "stage 0 on rank 1; in a loop it lies on rank 0$"),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", "stage 1 on rank 0; in a loop it lies on rank 1, or in a V on rank 1"),
    ],
)
def test_a_file_places_stages_in_a_loop_or_in_a_v(text, said):
    with pytest.raises(InputError, match=said):
        FileSchedule("mine.csv", from_csv(text))


def test_the_file_in_the_guide_is_the_schedule_that_it_says():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "schedules.md").read_text()
    shown = re.search(r"^```text\n(0F0.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert from_csv(shown[1]) == schedule_table(SCHEDULES["zb-h1"], 2, 3)


def test_the_guide_names_every_schedule():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "schedules.md").read_text()
    assert [name for name in SCHEDULES if not re.search(rf"^\| `{name}`", guide, re.MULTILINE)] == []
