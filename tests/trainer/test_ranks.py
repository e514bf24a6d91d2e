"""Ranks of tests end, well or with the reason."""

import os
import time

import pytest

pytest.importorskip("torch")

from .ranks import dist, on_ranks, quiet_ranks, torch  # noqa: F401


def summed(rank, start):
    here = torch.tensor([start + rank])
    dist.all_reduce(here)
    return rank, int(here)


def stumbling(rank):
    if rank == 1:
        raise ZeroDivisionError("rank 1 stumbled")
    dist.barrier()


def waiting(rank):
    if rank == 0:
        time.sleep(60)


def gone(rank):
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_every_rank_is_asked_and_answers_in_order():
    assert on_ranks(3, summed, 10) == [(0, 33), (1, 33), (2, 33)]


def test_a_ranks_exception_is_told_with_its_traceback_though_others_wait():
    with pytest.raises(AssertionError, match=r"rank 1 of 3 failed:\nTraceback[^$]*in stumbling[^$]*rank 1 stumbled"):
        on_ranks(3, stumbling)


def test_ranks_that_do_not_end_are_ended():
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 did not end within 1 s"):
        on_ranks(2, waiting, longest_s=1.0)
    assert time.monotonic() - began < 30


def test_a_rank_that_goes_without_a_word_is_noticed():
    with pytest.raises(AssertionError, match="rank 0 of 2 failed:\nit ended without a word"):
        on_ranks(2, gone)
