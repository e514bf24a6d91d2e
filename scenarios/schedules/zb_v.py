"""ZB-V: two chunks a rank in a V, and no bubble where all three passes take as long."""

from __future__ import annotations

from .action import FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, Codes, most_held, split_code, woven
from .schedule import VShaped


class ZeroBubbleV(VShaped):
    """ZB-V: no bubble once there are 2 p - 1 micro-batches, in the memory of 1F1B's first rank.

    It holds where forward, input gradient and weight gradient take as long, and messages nothing; a rank
    then idles only before its first pass and after its last. Where they differ the order stays and waits.

    Source: Qi et al. 2024, arXiv 2405.15362, section 4; the order is that of torch's ``ScheduleZBVZeroBubble``,
    which builds a step of fewer micro-batches by leaving out those that it does not have.
    """

    name = "zb-v"
    splits_backward = True

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[int]:
        """Down, up, and a steady state in which each chunk goes forward and wholly back by turns.

        >>> from .action import action_of
        >>> of_rank = ZeroBubbleV().codes(rank=0, ranks=1, micro_batches=2, chunks=2)
        >>> [str(action_of(code, split_code(code, 2)[1], micro_batches=2)) for code in of_rank]
        ['0F0', '1F0', '1I0', '1W0', '0F1', '0I0', '0W0', '1F1', '1I1', '1W1', '0I1', '0W1']
        """
        enough = max(2 * ranks - 1, micro_batches)
        codes = _of_enough(rank, ranks, enough)
        if enough == micro_batches:
            return codes
        split = [(code % KINDS, *split_code(code, enough)[1:]) for code in codes]
        return [KINDS * (chunk * micro_batches + i) + kind for kind, chunk, i in split if i < micro_batches]

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """Two passes for each rank, each of half a rank's layers."""
        if micro_batches >= 2 * ranks - 1:
            return 2 * ranks
        return most_held(self.codes(rank, ranks, micro_batches, chunks))


def _of_enough(rank: int, ranks: int, n: int) -> list[int]:
    """The order with n micro-batches, at least 2 p - 1."""
    of, F, X, W = Codes(n), FORWARD, INPUT_GRAD, WEIGHT_GRAD
    after = ranks - rank  # this rank and those below it in the V
    down = 2 * after - 1
    steady, tail = n - down - rank, after - 1  # rounds with a new micro-batch, and those without
    back = steady + tail  # = n - ranks
    up = rank + after  # = ranks
    return [
        *of.run(F, 0, 0, down),
        *woven(of.run(F, 1, 0, rank), of.run(F, 0, down, rank)),
        *woven(of.run(F, 1, rank, after), of.run(X, 1, 0, after), of.run(W, 1, 0, after)),
        *woven(
            of.run(F, 0, down + rank, steady),
            of.run(X, 0, 0, steady),
            of.run(W, 0, 0, steady),
            of.run(F, 1, up, steady),
            of.run(X, 1, after, steady),
            of.run(W, 1, after, steady),
        ),
        *woven(
            of.run(X, 0, steady, tail),
            of.run(W, 0, steady, tail),
            of.run(F, 1, up + steady, tail),
            of.run(X, 1, after + steady, tail),
            of.run(W, 1, after + steady, tail),
        ),
        *woven(of.run(X, 0, back, rank), of.run(X, 1, after + back, rank)),
        *woven(of.run(X, 0, back + rank, after), of.run(W, 0, back, after)),
        *of.run(W, 1, after + back, rank),
        *of.run(W, 0, back + after, rank),
    ]
