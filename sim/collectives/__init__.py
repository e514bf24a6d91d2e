"""Collectives, one module an algorithm and one line in the table."""

from .all_to_all import DirectAllToAll, DoubleSpreadAllToAll, HierarchicalAllToAll, PairwiseAllToAll
from .broadcast import BinomialBroadcast, ScatterAllGatherBroadcast
from .halving_doubling import BruckAllGather, BruckReduceScatter, DoublingAllReduce, HalvingDoublingAllReduce
from .hierarchical import HierarchicalAllGather, HierarchicalAllReduce, HierarchicalReduceScatter
from .in_switch import InSwitchAllReduce, InSwitchTreeAllReduce
from .point_to_point import Exchange, PointToPoint
from .ring import RingAllGather, RingAllReduce, RingBroadcast, RingReduceScatter
from .shape import Collective, CollectiveShape, GroupShape, Phase, Schedule, Transfer
from .torus import OffloadAllReduce, OffloadBroadcast, TorusAllGather, TorusAllReduce, TorusBroadcast
from .tree import TreeAllReduce

_ALL: tuple[Collective, ...] = (
    RingAllReduce(),
    TreeAllReduce(),
    DoublingAllReduce(),
    HalvingDoublingAllReduce(),
    HierarchicalAllReduce(),
    InSwitchAllReduce(),
    InSwitchTreeAllReduce(),
    TorusAllReduce(),
    OffloadAllReduce(),
    RingAllGather(),
    BruckAllGather(),
    HierarchicalAllGather(),
    TorusAllGather(),
    RingReduceScatter(),
    BruckReduceScatter(),
    HierarchicalReduceScatter(),
    RingBroadcast(),
    BinomialBroadcast(),
    ScatterAllGatherBroadcast(),
    TorusBroadcast(),
    OffloadBroadcast(),
    DirectAllToAll(),
    PairwiseAllToAll(),
    DoubleSpreadAllToAll(),
    HierarchicalAllToAll(),
    PointToPoint(),
    Exchange("sendrecv", both=False),
    Exchange("exchange", both=True),
)

COLLECTIVES: dict[tuple[str, str], Collective] = {(one.op, one.name): one for one in _ALL}

__all__ = ["COLLECTIVES", "Collective", "CollectiveShape", "GroupShape", "Phase", "Schedule", "Transfer"]
