"""DualPipe-V: the two directions of DualPipe folded onto one V."""

from __future__ import annotations

from collections import deque
from itertools import chain

from .action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Codes, woven
from .schedule import VShaped


class DualPipeV(VShaped):
    """DualPipe-V: a forward of one chunk beside a backward of the other, so that each hides the other's messages.

    Here the two of a pair follow each other, which shortens the bubble: (p - 1) forwards where forward, input
    gradient and weight gradient take as long. Where a pair is one piece of work that takes in two messages
    and gives out two, it is

        bubble = (p - 1) (forward and backward + backward - 3 weight gradients)

    A step needs 2 p micro-batches.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, and GitHub deepseek-ai/DualPipe for the half that
    is played here ("cut-in-half"); torch's ``ScheduleDualPipeV`` has the same order.
    """

    name = "dualpipe-v"
    splits_backward = True

    def least_micro_batches(self, ranks: int) -> int:
        """As many as there are virtual stages."""
        return 2 * ranks

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[int]:
        """Down, up, pairs of a forward and a backward, and an end in which weight gradients wait.

        >>> from .action import action_of, split_code
        >>> of_rank = DualPipeV().codes(rank=0, ranks=1, micro_batches=2, chunks=2)
        >>> [str(action_of(code, split_code(code, 2)[1], micro_batches=2)) for code in of_rank]
        ['0F0', '1F0', '0F1', '1B0', '1F1', '0B0', '1B1', '0I1', '0W1']
        """
        of, F, B = Codes(micro_batches), FORWARD, BACKWARD
        below = ranks - rank - 1
        down, cross, main = 2 * below, rank + 1, micro_batches - 2 * ranks + rank + 1
        return [
            *of.run(F, 0, 0, down),
            *woven(of.run(F, 0, down, cross), of.run(F, 1, 0, cross)),
            *woven(of.run(INPUT_GRAD, 1, 0, below), of.run(WEIGHT_GRAD, 1, 0, below), of.run(F, 1, cross, below)),
            *woven(
                of.run(F, 0, down + cross, main),
                of.run(B, 1, below, main),
                of.run(F, 1, cross + below, main),
                of.run(B, 0, 0, main),
            ),
            *woven(
                of.run(B, 1, below + main, below),
                of.run(F, 1, cross + below + main, below),
                of.run(B, 0, main, below),
            ),
            *_end(of, rank, below),
        ]

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """Two passes for each rank and one more, each of half a rank's layers."""
        return 2 * ranks + 1


def _end(of: Codes, rank: int, below: int) -> list[int]:
    """The backwards that no forward goes with; from half of them on, weight gradients wait for the very end."""
    n = of.micro_batches
    both, last = rank + 1, below  # backwards of the two chunks by turns, then of the first alone
    ups = of.run(BACKWARD, 1, n - both, both)
    downs = of.run(BACKWARD, 0, n - both - last, both)
    turns = woven(ups, downs)
    to_input, to_weight = INPUT_GRAD - BACKWARD, WEIGHT_GRAD - BACKWARD
    waiting = deque(code + to_weight for code in turns[both:])
    ended = [*turns[:both], *(code + to_input for code in turns[both:])]
    for code in of.run(INPUT_GRAD, 0, n - last, last):
        ended += (waiting.popleft(), code)
        waiting.append(code + WEIGHT_GRAD - INPUT_GRAD)
    return list(chain(ended, waiting))
