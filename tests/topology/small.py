"""Small machines of every kind of fabric, in the form of a machine file."""

from __future__ import annotations

import copy
from typing import Any

from exatwin.topology.machine import Machine, machine_from_document


def fact(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "made-up", "at": "nowhere"}


BASE: dict[str, Any] = {
    "name": "small",
    "title": "A small machine",
    "nodes": fact(1),
    "device": {
        "name": "D",
        "word": "GPU",
        "memory": fact("1 GB"),
        "memory_bandwidth": fact("1 GB/s"),
        "peak": {"fp32": fact("1 TFLOP/s")},
    },
    "node": {},
    "fabric": {},
    "charge": {"unit": "node-hour", "per_node": fact(1)},
}


def small(fabric: dict[str, Any], nodes: int, devices: int = 1, nics: int = 1, where: str = "small") -> Machine:
    """A machine of so many nodes; several devices hang on a switch of 100 GB/s, NICs are of 10 GB/s."""
    document = copy.deepcopy(BASE)
    document["nodes"] = fact(nodes)
    document["node"] = {
        "kind": "single" if devices == 1 else "switched",
        "devices": fact(devices),
        "nics": fact([{"name": f"nic{k}", "device": k % devices} for k in range(nics)]),
        "nic_bandwidth": fact("10 GB/s"),
    }
    if devices > 1:
        document["node"]["switch_bandwidth"] = fact("100 GB/s")
    document["fabric"] = fabric
    return machine_from_document(document, where)


def dragonfly(groups: int, switches: int, endpoints: int, links: int, nics: int = 1, beside: int = 1) -> Machine:
    """A full dragonfly of links of 10 GB/s."""
    nodes = switches * endpoints // nics
    fabric = {
        "kind": "dragonfly",
        "groups": fact(groups),
        "group_nodes": fact(nodes),
        "switches_per_group": fact(switches),
        "endpoints_per_switch": fact(endpoints),
        "links_per_group_pair": fact(links),
        "link_bandwidth": fact("10 GB/s"),
        "switches_per_node": fact(beside),
    }
    return small(fabric, groups * nodes, devices=max(nics, 1), nics=nics)


def fat_tree(nodes: int, leaf: int, levels: int, rails: int = 1, over: float = 1.0, **more: Any) -> Machine:
    """A fat tree of links of 10 GB/s, with one NIC a rail."""
    fabric = {
        "kind": "fat_tree",
        "levels": fact(levels),
        "nodes_per_leaf": fact(leaf),
        "rails": fact(rails),
        "oversubscription": fact(over),
        "link_bandwidth": fact("10 GB/s"),
        **{key: fact(value) for key, value in more.items()},
    }
    return small(fabric, nodes, devices=max(rails, 1), nics=rails)


def torus(shape: tuple[int, ...], rings: tuple[bool, ...], names: str = "uvwxyz") -> Machine:
    """A torus of links of 10 GB/s."""
    axes = [
        {"name": name, "length": fact(length), "ring": fact(ring)}
        for name, length, ring in zip(names, shape, rings, strict=False)
    ]
    nodes = 1
    for length in shape:
        nodes *= length
    return small({"kind": "torus", "axes": axes, "link_bandwidth": fact("10 GB/s")}, nodes, nics=2)
