"""What joins the devices of a machine: counts, ports and bandwidths, pictures, and graphs in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from ..topology.errors import InputError, input_error
from ..topology.units import format_bandwidth
from .documents import check_destination, drafted, write_document
from .terminal import Screen, group, indented, plain_table, spaced
from .words import counted, device_words

if TYPE_CHECKING:
    from ..topology.machine import Machine

# What the names of a summary mean; one that is missing here is shown by its own name.
WORDS = {
    "injection_bytes_per_s_per_node": "from a node into the fabric",
    "injection_bytes_per_s_per_group": "from the nodes into a group",
    "global_bytes_per_s_per_group": "out of a group",
    "global_bytes_per_s_per_node": "out of a group, a node's part",
    "group_pair_bytes_per_s": "from one group to another",
    "links_per_group_pair": "links between two groups",
    "link_bytes_per_s": "one link",
    "uplink_bytes_per_s_per_leaf": "up from a leaf",
    "bisection_bytes_per_s": "bisection",
    "diameter_hops": "diameter, hops",
    "endpoint_ports_per_switch": "ports of a switch, to nodes",
    "in_group_ports_per_switch": "ports of a switch, to its group",
    "global_ports_per_switch": "ports of a switch, to other groups",
    "ports_per_switch": "ports of a switch, all",
    "ports_per_node": "ports of a node",
    "least_ports": "ports of a switch, fewest",
    "most_ports": "ports of a switch, most",
    "nics_per_node": "NICs a node",
    "nodes_per_group": "nodes a group",
    "nodes_per_leaf": "nodes below a leaf",
    "nics_per_leaf": "NICs below a leaf",
}
TAPER = {
    "dragonfly": "what a group's NICs can send over what its links to other groups carry",
    "fat_tree": "what is sent into a leaf over what leads up from it",
}
WHOLE_TAPER = "what half of the machine can send over what gets across the bisection"
LISTED_KINDS = {"dragonfly": "groups", "fat_tree": "leaves", "torus": "shape", "graph": "switches"}


def save_topology(machine: Machine, path: str) -> None:
    """Draw a machine, or write its graph, as the ending says; the file appears whole or not at all.

    Raises:
        InputError: If the ending is none that is known, matplotlib is missing, or the file cannot be written.
    """
    from ..topology.graph import fabric_graph, write_graph
    from ..topology.picture import picture

    _check_ending(path)
    check_destination(path)
    with drafted(path) as draft:
        try:
            if draft.suffix in _pictures():
                picture(machine, draft)
            else:
                write_graph(fabric_graph(machine, with_nodes=True), draft)
        except InputError as error:
            raise InputError(path, error.problems) from None  # of the file that was asked for, not of its draft


def save_list(document: dict[str, Any], path: str) -> None:
    """Write the document of all machines.

    Raises:
        InputError: If the ending asks for a picture or a graph, which are of one machine.
    """
    if Path(path).suffix in (*_pictures(), ".graphml", ".edges"):
        raise input_error("a picture or a graph is of one machine: exatwin show topology NAME -o FILE", where=path)
    write_document(document, path)


def topology_document(machine: Machine) -> dict[str, Any]:
    """The node and the fabric of a machine, in plain JSON types."""
    from ..topology.graph import fabric_summary

    node = machine.node
    links = [
        {
            "between": list(link.between),
            "count": link.count,
            "bandwidth_bytes_per_s": node.pair_bytes_per_s(*link.between),
        }
        for link in node.links
    ]
    return {
        "name": machine.name,
        "title": machine.title,
        "nodes": machine.node_count,
        "devices": machine.device_count,
        "node": {
            "kind": node.kind,
            "devices": machine.devices_per_node,
            "links": links,
            "switch_bytes_per_s": node.switch_bandwidth.value if node.switch_bandwidth else None,
            "nics": [{"name": nic.name, "device": nic.device} for nic in node.nics],
            "nic_bytes_per_s": node.nic_bandwidth_bytes_per_s,
        },
        "fabric": fabric_summary(machine),
    }


def topology_view(machine: Machine, screen: Screen) -> Sequence[RenderableType]:
    """One machine: its node, and its fabric."""
    from ..topology.graph import fabric_summary

    summary = fabric_summary(machine)
    kind = str(summary.pop("kind"))
    table = plain_table(kind.replace("_", " "), "", whole=screen.roomy)
    for key, value in summary.items():
        table.add_row(_name(key), _shown(key, value))
    notes = [f"taper: {TAPER.get(kind, WHOLE_TAPER)}; every bandwidth is of one direction"]
    head = [
        Text(f"{machine.name}: {machine.title}", style="bold"),
        indented(device_words(machine, machine.device_count)),
    ]
    endings = ", ".join((*_pictures(), ".graphml", ".json", ".edges"))
    return spaced(
        [
            group([*head, indented(port_words(machine))]),
            *link_maps(machine),
            group([table, *(indented(note, "dim") for note in notes)]),
            indented(f"-o FILE draws it or writes its graph, as the ending says: {endings}", "dim"),
        ]
    )


LISTED_WIDTH = 88  # columns from which on the list of machines has room for every figure


def topology_list(machines: Sequence[Machine], screen: Screen) -> Sequence[RenderableType]:
    """All machines, a line each."""
    from ..topology.graph import fabric_summary

    more: tuple[str, ...] = ("a node sends",) if screen.roomy else ()
    if screen.width >= LISTED_WIDTH:
        more += ("diameter",)
    table = plain_table("machine", "fabric", "", "bisection", "taper", *more, left=("fabric",), whole=screen.roomy)
    for machine in machines:
        summary = fabric_summary(machine)
        part = LISTED_KINDS[machine.fabric.kind]
        size = f"{summary[part]}" if part == "shape" else f"{summary[part]:,} {part}"
        cells = [
            machine.fabric.kind.replace("_", " "),
            size,
            _shown("bisection_bytes_per_s", summary["bisection_bytes_per_s"]),
        ]
        cells.append(_shown("taper", summary["taper"]))
        if "a node sends" in more:
            cells.append(format_bandwidth(machine.node.injection_bytes_per_s, 0))
        if "diameter" in more:
            cells.append(f"{summary['diameter_hops']} hops" if "diameter_hops" in summary else "")
        table.add_row(machine.name, *cells)
    note = "bandwidths are of one direction; exatwin show topology NAME shows one, and draws it with -o FILE.svg"
    return [table, indented(note, "dim")]


def port_words(machine: Machine) -> str:
    """How a node reaches the fabric."""
    node = machine.node
    return (
        f"a node reaches the {machine.fabric.kind.replace('_', ' ')} with {counted(node.nic_count, 'NIC')} of "
        f"{format_bandwidth(node.nic_bandwidth_bytes_per_s)} each way"
    )


def link_maps(machine: Machine) -> list[RenderableType]:
    """The links between the devices of a node, and which NIC hangs on which device."""
    node, devices = machine.node, machine.devices_per_node
    tables: list[RenderableType] = []
    if node.links and devices <= 16:
        each = format_bandwidth(node.link_bandwidth.value, 0) if node.link_bandwidth else ""
        table = plain_table(f"links of {each}", *(str(number) for number in range(devices)), "NIC")
        for a in range(devices):
            counts = ["." if a == b else str(node.link_count(a, b) or "") for b in range(devices)]
            table.add_row(f"{machine.device.word} {a}", *counts, ", ".join(node.nics_of(a)))
        tables.append(group([table, *(indented(line) for line in _other_links(machine))]))
    elif node.switch_bandwidth:
        each = format_bandwidth(node.switch_bandwidth.value, 0)
        tables.append(indented(f"{devices} {machine.device.words} on one switch, {each} each way"))
    return tables


def _other_links(machine: Machine) -> list[str]:
    """Pairs of devices whose links are not as the others, by their bandwidth."""
    pairs: dict[str, list[str]] = {}
    for link in machine.node.links:
        if link.bandwidth:
            pair = "-".join(map(str, link.between))
            pairs.setdefault(format_bandwidth(link.bandwidth.value, 0), []).append(pair)
    return [f"{', '.join(found)}: {each}" for each, found in pairs.items()]


def _pictures() -> tuple[str, ...]:
    from ..topology.picture import PICTURE_SUFFIXES

    return PICTURE_SUFFIXES


def _check_ending(path: str) -> None:
    from ..topology.graph_files import GRAPH_SUFFIXES

    ending = Path(path).suffix
    if ending not in (*_pictures(), *GRAPH_SUFFIXES):
        told = f"not {ending!r}" if ending else "and this name has no ending"
        message = f"a picture ends in {', '.join(_pictures())} and a graph in {', '.join(GRAPH_SUFFIXES)}, {told}"
        raise input_error(message, where=path)


def _name(key: str) -> str:
    return WORDS.get(key, key.replace("_", " "))


def _shown(key: str, value: Any) -> str:
    if "bytes_per_s" in key:
        return format_bandwidth(float(value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
