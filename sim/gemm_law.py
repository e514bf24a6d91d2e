"""How fast a matrix product of some shape runs: tiles, waves, and the inner dimension.

A library cuts the result into tiles; each unit of the device works on one at a time, so a
last wave that is not full costs as much as a full one. Libraries hold kernels of several
tile sizes and take the quickest: a smaller tile wastes less of a small result, and reads more
bytes for each multiply-add. Filling and draining a tile's pipeline costs as much as some more
steps of the inner dimension.

The law is NVIDIA's description of wave quantisation ("Matrix Multiplication Background", Deep
Learning Performance documentation); how well it fits measured products stands with each device.
"""

from __future__ import annotations

from dataclasses import dataclass

from .calibration import TileLaw
from .ops import Gemm

SUM_BYTES = 4 + 4  # an element of a sum in fp32: read, written


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a product's result; ``share`` of the full rate is what a unit reaches on it."""

    rows: int
    columns: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Matrix products in one precision.

    Attributes:
        flop_per_s: A large product.
        tiles: Tiles that the library may take.
        units: Units of the device that share the tiles.
        k_half: Inner dimension at which a product loses half of its rate.
        group_rows: Rows by which a matrix of a grouped product costs more than it has.
        operand_bytes: Bytes of an element that is read.
        result_bytes: Bytes of an element that is written.
    """

    flop_per_s: float
    tiles: tuple[Tile, ...]
    units: int
    k_half: float = 0.0
    group_rows: float = 0.0
    operand_bytes: int = 2
    result_bytes: int = 2


def tiles_of(law: TileLaw) -> tuple[Tile, ...]:
    """The tiles a law allows, each both ways round: the largest, and its longer side halved down to the smallest.

    A tile of ``r x c`` makes ``r c / (r + c)`` multiply-adds for each element it reads; at
    ``intensity_half`` of those a unit loses half of its rate, counted from the largest tile.
    """
    rows, columns = law.rows.value, law.columns.value
    least = law.smallest.value if law.smallest else max(rows, columns)
    half = law.intensity_half.value if law.intensity_half else 0.0

    def share(r: int, c: int) -> float:
        intensity = r * c / (r + c)
        return intensity / (intensity + half)

    full = share(rows, columns)
    tiles = [Tile(rows, columns)]
    while max(rows, columns) > least and max(rows, columns) > 1:
        rows, columns = (rows // 2, columns) if rows >= columns else (rows, columns // 2)
        tiles.append(Tile(rows, columns, share(rows, columns) / full))
    turned = [Tile(tile.columns, tile.rows, tile.share) for tile in tiles if tile.rows != tile.columns]
    return tuple(tiles + turned)


def shape_efficiency(gemm: Gemm, rates: GemmRates) -> float:
    """Share of the full rate that a product of this shape reaches, at most 1.

    A batch of products shares the waves; so do the matrices of a grouped one, each with ``group_rows`` more.

    >>> rates = GemmRates(1e12, (Tile(128, 256), Tile(256, 128)), units=64)
    >>> shape_efficiency(Gemm("x", 1024, 1024, 4096), rates)
    0.5
    """
    m = gemm.m + rates.group_rows if gemm.grouped else gemm.m
    cost = min(
        -(-gemm.count * -(-m // tile.rows) * -(-gemm.n // tile.columns) // rates.units)
        * (tile.rows * tile.columns / tile.share)
        for tile in rates.tiles
    )
    return gemm.count * gemm.m * gemm.n / (cost * rates.units) * gemm.k / (gemm.k + rates.k_half)


def gemm_bytes(gemm: Gemm, rates: GemmRates) -> float:
    """Bytes that the products move: operands read and the result written once each; a sum in fp32 read and written."""
    read, written = gemm.m * gemm.k + gemm.k * gemm.n, gemm.m * gemm.n
    result = SUM_BYTES if gemm.adds else rates.result_bytes
    return float(gemm.count * (rates.operand_bytes * read + result * written))
