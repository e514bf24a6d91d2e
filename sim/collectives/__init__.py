"""Collectives, one module an algorithm and one line in the table."""

from .point_to_point import PointToPoint
from .ring import RingAllGather, RingAllReduce, RingReduceScatter
from .shape import Collective, CollectiveShape

COLLECTIVES: dict[tuple[str, str], Collective] = {
    (collective.op, collective.name): collective
    for collective in (RingAllReduce(), RingAllGather(), RingReduceScatter(), PointToPoint())
}

__all__ = ["COLLECTIVES", "Collective", "CollectiveShape"]
