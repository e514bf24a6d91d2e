"""Where a scenario's ranks run, as its file says it; `exatwin.topology.placement` builds it."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .errors import input_error
from .files import read_text

ORDERS = tuple("-".join(order) for order in permutations(("tp", "dp", "pp")))
DEFAULT_ORDER = "tp-dp-pp"
FIELD = "placement"

NodeNumber = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Length = Annotated[int, Field(strict=True, ge=1, le=10**6)]


class PlacementSpec(BaseModel):
    """Where a scenario's ranks run, as its file says it."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Placement")

    order: str = Field(default=DEFAULT_ORDER, max_length=40, description="what varies fastest first: tp-dp-pp, ...")
    device_order: tuple[NodeNumber, ...] | None = Field(
        default=None, max_length=1024, description="local rank i runs on device device_order[i] of its node"
    )
    nodes: Literal["contiguous", "spread"] | tuple[NodeNumber, ...] = Field(
        default="contiguous", description="the first nodes, as many groups as can be, or the nodes' numbers"
    )
    groups: Length | None = Field(default=None, description="spread over so many groups or leaves; all where left out")
    node_file: str | None = Field(
        default=None, min_length=1, max_length=4000, description="a file of node numbers or ranges, one a line"
    )
    shape: tuple[Length, ...] | None = Field(
        default=None, min_length=1, max_length=10, description="the job's own torus, on a machine that is one"
    )

    def with_nodes_read(self, folder: Path | None = None) -> PlacementSpec:
        """The same with the nodes of its file in place of the file's name.

        Args:
            folder: Where the file's path starts from.

        Raises:
            InputError: If the file cannot be read, or ``nodes`` says something else.
        """
        if self.node_file is None:
            return self
        if self.nodes != "contiguous":
            raise input_error("stands beside node_file; give one of them", field=f"{FIELD}.nodes")
        path = Path(self.node_file).expanduser()
        nodes = read_node_file(path if folder is None else folder / path)
        return self.model_copy(update={"nodes": nodes, "node_file": None})


def read_node_file(path: Path) -> tuple[int, ...]:
    """The node numbers of a file: one number or range (``12-19``) a line, ``#`` before a comment.

    Raises:
        InputError: If a line is neither; it names the line.
    """
    where = str(path)
    nodes: list[int] = []
    for number, line in enumerate(read_text(path, where).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", text, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            shown = text if len(text) <= 40 else f"{text[:37]}..."
            message = f"line {number}: {shown!r} is no node number and no range; write 12 or 12-19"
            raise input_error(message, where=where, field=f"{FIELD}.node_file")
        if len(nodes) + last - first >= 10**6:
            raise input_error(f"line {number}: names more than 1000000 nodes", where=where, field=f"{FIELD}.node_file")
        nodes += range(first, last + 1)
    if not nodes:
        raise input_error("names no node", where=where, field=f"{FIELD}.node_file")
    return tuple(nodes)
