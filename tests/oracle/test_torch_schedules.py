"""Our schedules against torch's own, where torch is installed.

torch builds its tables in private methods of classes that want a model; the methods read a few
sizes only. Where a torch has other ones the comparison is skipped.
"""

from __future__ import annotations

import pytest

from exatwin.scenarios.schedules import SCHEDULES, code_table, from_csv, schedule_table, split_code, to_csv

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_table(kind, ranks, micro_batches, chunks):
    """torch's table, through its text."""
    schedule = object.__new__(getattr(theirs, kind))
    count = max(1, micro_batches // ranks)
    vars(schedule).update(
        pp_group_size=ranks,
        num_stages=ranks * chunks,
        _num_stages=ranks * chunks,
        n_local_stages=chunks,
        _n_microbatches=micro_batches,
        number_of_rounds=count,
        microbatches_per_round=micro_batches // count,
    )
    try:
        rows = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    except AttributeError as error:
        pytest.skip(f"this torch builds {kind} in another way: {error}")
    return from_csv("".join(",".join(str(action or "") for action in row) + "\n" for row in rows))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_is_torchs_where_rounds_are_alike(ranks, chunks):
    for micro_batches in range(1, 4 * ranks):
        if micro_batches % max(1, micro_batches // ranks) == 0:
            ours = schedule_table(SCHEDULES["interleaved"], ranks, micro_batches, chunks)
            assert ours == torch_table("ScheduleInterleaved1F1B", ranks, micro_batches, chunks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_zb_v_is_torchs(ranks):
    for micro_batches in range(1, 4 * ranks):
        ours = schedule_table(SCHEDULES["zb-v"], ranks, micro_batches)
        assert ours == torch_table("ScheduleZBVZeroBubble", ranks, micro_batches, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_dualpipe_v_is_torchs(ranks):
    for micro_batches in range(2 * ranks, 4 * ranks):
        ours = schedule_table(SCHEDULES["dualpipe-v"], ranks, micro_batches)
        assert ours == torch_table("ScheduleDualPipeV", ranks, micro_batches, 2)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_torch_takes_what_we_write(schedule, ranks):
    """Its own check of a table, on the cells that we write."""
    micro_batches, chunks = 2 * ranks + 1, schedule.least_chunks
    text = to_csv(schedule_table(schedule, ranks, micro_batches))
    rows = dict(enumerate([theirs._Action.from_str(cell) for cell in line.split(",")] for line in text.splitlines()))
    placed = theirs._validate_schedule(rows, ranks, ranks * chunks, micro_batches)
    assert placed == {stage: schedule.home(stage, ranks, chunks)[0] for stage in range(ranks * chunks)}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_letters_of_our_codes_are_torchs(schedule):
    codes = code_table(schedule, 2, 4)[0]
    kinds = {theirs._ComputationType("FBIW"[split_code(code, 4)[0]]) for code in codes}
    assert theirs.F in kinds
    assert (theirs.I in kinds) == (theirs.W in kinds) == schedule.splits_backward
