"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from .action import BACKWARD, FORWARD, Codes
from .schedule import Looped


class GPipe(Looped):
    """GPipe: a rank holds every micro-batch of the step at once.

    With several chunks a rank it goes breadth first: all micro-batches through one chunk, then
    through the next.

    Source: Huang et al. 2019, arXiv 1811.06965; Lamy-Poirier 2022, arXiv 2211.05953, for several chunks.
    Backwards run in the order of the forwards, as torch's ``ScheduleGPipe`` does.
    """

    name = "gpipe"
    splits_backward = False

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[int]:
        """The same on every rank.

        >>> from .action import action_of
        >>> [str(action_of(code, 0)) for code in GPipe().codes(rank=0, ranks=2, micro_batches=2, chunks=1)]
        ['0F0', '0F1', '0B0', '0B1']
        """
        of = Codes(micro_batches)
        forwards = of.run(FORWARD, 0, 0, chunks * micro_batches)
        back = [code for chunk in reversed(range(chunks)) for code in of.run(BACKWARD, chunk, 0, micro_batches)]
        return [*forwards, *back]

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """All of them."""
        return micro_batches * chunks
