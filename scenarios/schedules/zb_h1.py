"""ZB-H1: 1F1B whose weight gradients wait for the bubble at the end."""

from __future__ import annotations

from .action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Codes, woven
from .schedule import Looped


class ZeroBubbleH1(Looped):
    """ZB-H1: a third of 1F1B's bubble in the memory of its first rank, which every rank now holds.

    Rank r runs its forwards and input gradients as 1F1B does, and each weight gradient r input
    gradients later. The work held back fills the end, where 1F1B waits:

        bubble = (p - 1) (forward + input gradient - weight gradient)

    where a weight gradient takes no longer than either of the others, and there are 2 p micro-batches.

    Source: Qi et al. 2023, arXiv 2401.10241, section 2.3 and Table 2.
    """

    name = "zb-h1"
    splits_backward = True
    chunks: tuple[int, ...] | None = (1,)

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[int]:
        """As 1F1B, with the weight gradients ``rank`` input gradients behind.

        >>> from .action import action_of
        >>> of_rank = ZeroBubbleH1().codes(rank=1, ranks=2, micro_batches=3, chunks=1)
        >>> [str(action_of(code, 1)) for code in of_rank]
        ['1F0', '1I0', '1F1', '1I1', '1W0', '1F2', '1I2', '1W1', '1W2']
        """
        of, kinds = Codes(micro_batches), (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
        ahead = min(ranks - rank - 1, micro_batches)
        pairs = micro_batches - ahead  # slots with a forward
        behind = min(rank, micro_batches)  # input gradients before the first weight gradient

        def slots(first: int, last: int, forward: bool, weight: bool) -> list[int]:
            """The slots first to last, counted by their input gradient."""
            starts = (first + ahead, first, first - behind)
            wanted = (forward, True, weight)
            count = max(last - first, 0)
            runs = [
                of.run(kind, 0, start, count) for kind, start, yes in zip(kinds, starts, wanted, strict=True) if yes
            ]
            return woven(*runs)

        return [
            *of.run(FORWARD, 0, 0, ahead),
            *slots(0, min(behind, pairs), True, False),
            *slots(behind, pairs, True, True),
            *slots(pairs, behind, False, False),
            *slots(max(behind, pairs), micro_batches, False, True),
            *of.run(WEIGHT_GRAD, 0, micro_batches - behind, behind),
        ]

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """As many as there are ranks, on every rank."""
        return min(ranks, micro_batches)
