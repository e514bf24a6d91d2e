"""Work of a device and a collective at the same time: what of the collective shows, and what the work takes longer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Both:
    """Work and communication that ran together.

    Attributes:
        work_s: The device's work, longer where it ran beside communication.
        exposed_s: Communication that no work covered.
    """

    work_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """From the start of both to the end of the later."""
        return self.work_s + self.exposed_s

    def __add__(self, other: Both) -> Both:
        return Both(self.work_s + other.work_s, self.exposed_s + other.exposed_s)


def beside(work_s: float, comm_s: float, slowdown: float = 1.0, pieces: int = 1) -> Both:
    """Work that starts together with a communication.

    While both run the work takes ``slowdown`` times as long; the communication keeps its pace. Where one
    feeds the other in ``pieces``, the first piece of one runs before, or the last one after, the other.

    >>> beside(4.0, 1.0), beside(1.0, 4.0)
    (Both(work_s=4.0, exposed_s=0.0), Both(work_s=1.0, exposed_s=3.0))
    >>> beside(4.0, 1.0, slowdown=1.25).total_s
    4.2
    >>> beside(4.0, 4.0, pieces=4)
    Both(work_s=4.0, exposed_s=1.0)
    """
    if pieces > 1:
        alone_s = work_s / pieces
        rest = beside(work_s - alone_s, comm_s, slowdown)
        return Both(alone_s + rest.work_s, rest.exposed_s)
    if work_s * slowdown <= comm_s:
        return Both(work_s * slowdown, comm_s - work_s * slowdown)
    return Both(work_s + comm_s * (1 - 1 / slowdown), 0.0)


def ring_forward(block_s: float, hop_s: float, steps: int, slowdown: float = 1.0) -> Both:
    """Attention over blocks that go round a ring: each block comes while the one before is worked on.

    With blocks alike, ``(c - 1) max(block, hop) + block``.

    Source: Liu et al. 2023, arXiv 2310.01889, section 3.

    >>> ring_forward(2.0, 3.0, steps=4).total_s
    11.0
    """
    both = Both(block_s, 0.0)
    for _ in range(steps - 1):
        both += beside(block_s, hop_s, slowdown)
    return both


def ring_backward(block_s: float, hop_s: float, double_hop_s: float, steps: int, slowdown: float = 1.0) -> Both:
    """Its backward: gradients of keys and values follow one block behind, and are home with the last.

    A rank begins where its forward ended, so the last block is its own. Beside the first block only the next keys
    and values travel, beside those between the gradients of the block before as well, beside the last only the
    gradients that others made of this rank's.

    Args:
        block_s: One block's kernel.
        hop_s: One block's keys and values, or their gradients, to the neighbour.
        double_hop_s: Both in one message.
        steps: Blocks.
        slowdown: Of work beside communication.

    Source: Transformer Engine, transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py,
    ``AttnFuncWithCPAndKVP2P.backward``.

    >>> ring_backward(2.0, 1.0, 2.0, steps=4).total_s
    8.0
    """
    both = beside(block_s, hop_s, slowdown) + beside(block_s, hop_s, slowdown)
    for _ in range(steps - 2):
        both += beside(block_s, double_hop_s, slowdown)
    return both
