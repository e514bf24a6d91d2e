"""What gradients and weights travel in where that overlaps with a pass: a piece a layer, and its ends.

A backward runs through head, layers from last to first, embedding; a forward the other way.
Time in a pass is shared out by parameters, which a matrix product's FLOP are in proportion to;
the embedding takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tail import Piece


@dataclass(frozen=True)
class Parts:
    """Parameters of a virtual stage on one rank.

    Attributes:
        layers: How many layers.
        parameters: Of all of it.
        embedding: Of the embedding in it.
        head: Of the head in it; where it shares the embedding's weights, those that it multiplies with.
        own_head: Whether the head has parameters of its own.
    """

    layers: int
    parameters: int
    embedding: int = 0
    head: int = 0
    own_head: bool = True

    @property
    def layer(self) -> float:
        """Of one layer."""
        rest = self.parameters - self.embedding - (self.head if self.own_head else 0)
        return max(rest, 0) / max(self.layers, 1)

    def in_forward(self) -> list[tuple[float, float]]:
        """What the forward runs through: parameters of each part, and its time in units of parameters."""
        parts = [(float(self.embedding), 0.0)] if self.embedding else []
        parts += [(self.layer, self.layer)] * self.layers
        if self.head:
            parts.append((float(self.head) if self.own_head else 0.0, float(self.head)))
        return parts


def gradient_pieces(chunks: Sequence[Parts], order: Sequence[int]) -> tuple[Piece, ...]:
    """A rank's gradients, in the order in which its last backwards make them.

    Args:
        chunks: What each chunk of the rank holds.
        order: Its chunks as their gradients are ready.

    >>> [(piece.at, piece.share) for piece in gradient_pieces([Parts(layers=2, parameters=6, embedding=2)], [0])]
    [(0.5, 0.3333333333333333), (1.0, 0.3333333333333333), (1.0, 0.3333333333333333)]
    """
    whole = sum(chunk.parameters for chunk in chunks)
    pieces = []
    for chunk in order:
        parts = chunks[chunk].in_forward()[::-1]
        length, done = sum(time for _, time in parts) or 1.0, 0.0
        for size, time in parts:
            done += time
            if size > 0:
                pieces.append(Piece(chunk, min(done / length, 1.0), size / whole))
    return tuple(pieces)


def weight_pieces(chunks: Sequence[Parts]) -> tuple[Piece, ...]:
    """A rank's new weights, in the order in which its first forwards need them.

    >>> [(piece.at, piece.share) for piece in weight_pieces([Parts(layers=2, parameters=4)])]
    [(0.0, 0.5), (0.5, 0.5)]
    """
    whole = sum(chunk.parameters for chunk in chunks)
    pieces = []
    for number, chunk in enumerate(chunks):
        parts = chunk.in_forward()
        length, done = sum(time for _, time in parts) or 1.0, 0.0
        for size, time in parts:
            if size > 0:
                pieces.append(Piece(number, done / length, size / whole))
            done += time
    return tuple(pieces)
