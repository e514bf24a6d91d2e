"""The networks between nodes: one module a kind, and one line in `FABRICS`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .dragonfly import Dragonfly
from .fat_tree import FatTree
from .torus import Torus
from .user_graph import UserGraph

FABRICS = {"dragonfly": Dragonfly, "fat_tree": FatTree, "torus": Torus, "graph": UserGraph}

Fabric = Annotated[Dragonfly | FatTree | Torus | UserGraph, Field(discriminator="kind")]

__all__ = ["FABRICS", "Dragonfly", "Fabric", "FatTree", "Torus", "UserGraph"]
