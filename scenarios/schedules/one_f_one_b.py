"""1F1B: one forward, one backward, once the pipeline is full."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

from .action import BACKWARD, FORWARD, Codes, woven
from .schedule import Looped


class OneForwardOneBackward(Looped):
    """1F1B: a rank holds at most ``ranks - rank`` micro-batches at once.

    With several chunks a rank it is the interleaved order. Its rounds are as even as they can be: Megatron-LM
    asks for a multiple of pp micro-batches, torch for rounds of one size, and both then run this order.

    Source: Narayanan et al. 2020, arXiv 2006.09503 (PipeDream-Flush), as Megatron-LM, DeepSpeed and
    torch's ``Schedule1F1B`` run it.
    """

    name = "1f1b"
    splits_backward = False

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[int]:
        """Forwards until the pipeline is full, then one of each, then the backwards left over.

        >>> from .action import action_of
        >>> of_rank = OneForwardOneBackward().codes(rank=0, ranks=2, micro_batches=3, chunks=1)
        >>> [str(action_of(code, 0)) for code in of_rank]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
        """
        forwards, backwards = _orders(micro_batches, chunks, ranks)
        ahead = self._ahead(rank, ranks, micro_batches, chunks)
        return [
            *forwards[:ahead],
            *woven(forwards[ahead:], backwards[: len(backwards) - ahead]),
            *backwards[len(backwards) - ahead :],
        ]

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """Those ahead of the first backward, and the one whose turn it is."""
        return min(self._ahead(rank, ranks, micro_batches, chunks) + 1, micro_batches * chunks)

    def _ahead(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """Forwards before the first pair.

        With one chunk the ranks that follow; with more, a round of each chunk but the last, and twice the
        ranks that follow, since those have to come forward and back.
        """
        ahead = ranks - rank - 1
        if chunks > 1:
            ahead = (chunks - 1) * rounds(micro_batches, ranks)[0] + 2 * ahead
        return min(ahead, micro_batches * chunks)


class Interleaved(OneForwardOneBackward):
    """Interleaved 1F1B: several chunks a rank; the bubble shrinks by their number, and sends grow by it.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """

    name = "interleaved"
    least_chunks = 2


def rounds(micro_batches: int, ranks: int) -> list[int]:
    """Micro-batches of each round: as many as there are ranks, and what is left over shared, the first rounds first.

    A rank runs one chunk over a round, then the next chunk over the same round.

    >>> rounds(8, 4), rounds(6, 4), rounds(11, 4), rounds(2, 4)
    ([4, 4], [6], [6, 5], [2])
    """
    count = max(1, micro_batches // ranks)
    each, more = divmod(micro_batches, count)
    return [each + 1] * more + [each] * (count - more)


@lru_cache(maxsize=4)
def _orders(micro_batches: int, chunks: int, ranks: int) -> tuple[list[int], list[int]]:
    """All forwards and all backwards in the order in which every rank runs them."""
    of = Codes(micro_batches)
    if chunks == 1:
        return list(of.run(FORWARD, 0, 0, micro_batches)), list(of.run(BACKWARD, 0, 0, micro_batches))
    forwards, backwards = [], []
    first = 0
    for size in rounds(micro_batches, ranks):
        forwards += [of.run(FORWARD, chunk, first, size) for chunk in range(chunks)]
        backwards += [of.run(BACKWARD, chunk, first, size) for chunk in reversed(range(chunks))]
        first += size
    return list(chain(*forwards)), list(chain(*backwards))
