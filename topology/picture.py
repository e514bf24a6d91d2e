"""Pictures of a machine: one node, and the fabric between nodes. `matplotlib` is loaded when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import input_error
from .fabrics import Dragonfly, FatTree, Torus, UserGraph
from .graph import fabric_summary, node_graph
from .machine import Machine
from .units import format_bandwidth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
MOST_EDGES = 3_000  # of a user's graph; more is a black square

DEVICE, NIC, SWITCH, MODULE, INK = "#4c78a8", "#f58518", "#54a24b", "#e8eef5", "#333333"
GLOBAL = "#b279a2"


def picture(machine: Machine, path: str | Path) -> None:
    """Draw one node of a machine and its fabric into a file, ``.svg``, ``.png`` or ``.pdf``.

    Of a large fabric a part is drawn, and the numbers of the whole stand beside it.

    Raises:
        InputError: If the ending is another, matplotlib is missing, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in PICTURE_SUFFIXES:
        raise input_error(f"a picture ends in {', '.join(PICTURE_SUFFIXES)}, not {path.suffix!r}", where=str(path))
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        message = "a picture needs matplotlib; install it with: pip install 'exatwin[plot]'"
        raise input_error(message, where=str(path)) from None
    figure = Figure(figsize=(14, 7.6), facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.subplots_adjust(left=0.02, right=0.98, top=0.86, bottom=0.2, wspace=0.05)
    figure.suptitle(machine.title, fontsize=17, fontweight="bold", y=0.97)
    _draw_node(left, machine)
    _draw_fabric(right, machine)
    for axes in (left, right):
        axes.set_axis_off()
        axes.set_aspect("equal")
    figure.text(0.03, 0.15, _node_words(machine), fontsize=10.5, va="top", color=INK, linespacing=1.5)
    figure.text(0.5, 0.15, _fabric_words(machine), fontsize=10.5, va="top", color=INK, linespacing=1.5)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise input_error(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def _rate(value: float | int | str) -> str:
    text = format_bandwidth(float(value), 1)
    return text.replace(".0 ", " ")


def _node_words(machine: Machine) -> str:
    node, device = machine.node, machine.device
    counted = f", {machine.device_count:,} {device.words}" if machine.devices_per_node > 1 else ""
    lines = [f"{machine.node_count:,} nodes{counted} ({device.name})"]
    if node.kind == "point_to_point" and node.link_bandwidth:
        several = any(link.count > 1 for link in node.links)
        line = f"one link {_rate(node.link_bandwidth.value)} each way"
        lines.append(line + "; a number on a line counts its links" * several)
    elif node.switch_bandwidth:
        lines.append(f"each {device.word} to the switch {_rate(node.switch_bandwidth.value)} each way")
    ports = f"{node.nic_count} NIC{'s' * (node.nic_count > 1)} of {_rate(node.nic_bandwidth.value)}"
    lines.append(f"{ports}, {_rate(node.injection_bytes_per_s)} a node into the fabric")
    return "\n".join(lines)


def _fabric_words(machine: Machine) -> str:
    fabric, known = machine.fabric, fabric_summary(machine)
    link = f"link {_rate(known['link_bytes_per_s'])} each way"
    if isinstance(fabric, Dragonfly):
        lines = [
            f"dragonfly: {known['groups']} groups of {known['switches'] // fabric.groups.value} switches, "  # type: ignore[operator]
            f"{known['nodes_per_group']} nodes a group; {link}",
            f"{known['links_per_group_pair']} links between any two groups, {_rate(known['group_pair_bytes_per_s'])}; "
            f"out of a group {_rate(known['global_bytes_per_s_per_group'])}",
        ]
    elif isinstance(fabric, FatTree):
        lines = [
            f"fat tree: {known['levels']} level{'s' * (known['levels'] != 1)}, {known['leaves']} leaves, "
            f"{known['rails']} rail{'s' * (known['rails'] != 1)}, {known['nodes_per_leaf']} nodes below a leaf; {link}",
            f"out of a leaf {_rate(fabric.leaf_bytes_per_s(machine.node.nic_count))}, "
            f"oversubscription {fabric.oversubscription.value:g}",
        ]
    elif isinstance(fabric, Torus):
        lines = [
            f"torus {known['shape']} ({', '.join(fabric.names)}); {link}",
            f"{known['ports_per_node']} links a node" + ("; a job sees a 3-D torus of its own" * fabric.is_tofu),
        ]
    else:
        lines = [f"graph: {known['switches']} switches, {known['edges']} edges; {link}"]
    lines.append(
        f"bisection {_rate(known['bisection_bytes_per_s'])}, taper {known['taper']:.4g}"
        + (f", at most {known['diameter_hops']} hops" if "diameter_hops" in known else "")
    )
    return "\n".join(lines)


Point = tuple[float, float]


def _line(axes: Axes, a: Point, b: Point, **style: Any) -> None:
    axes.plot([a[0], b[0]], [a[1], b[1]], **{"color": INK, "zorder": 1, "solid_capstyle": "round", **style})


def _lines(axes: Axes, places: Sequence[Point], **style: Any) -> None:
    """A line between any two of the places."""
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(list(combinations(places, 2)), zorder=1, **style))


def _box(axes: Axes, at: Point, size: Point, text: str, colour: str, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = at[0] - size[0] / 2, at[1] - size[1] / 2
    axes.add_patch(
        FancyBboxPatch(
            corner, *size, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, edgecolor="white", zorder=3
        )
    )
    words = {"color": "white", "fontsize": 10, "fontweight": "bold", "ha": "center", "va": "center", "zorder": 4}
    axes.text(*at, text, **{**words, **style})


def _draw_node(axes: Axes, machine: Machine) -> None:
    graph = node_graph(machine)
    count = machine.devices_per_node
    axes.set_title("one node", fontsize=13, color=INK)
    if machine.node.kind == "single":
        places: dict[Any, Point] = {("device", 0): (0.0, 0.0)}
    elif machine.node.kind == "switched":
        places = {("device", n): ((n - (count - 1) / 2) * 0.62, 0.0) for n in range(count)}
        places[("switch",)] = (0.0, 1.25)
    else:
        places = _on_modules(axes, machine)
    _place_nics(machine, places)
    for a, b, edge in graph.edges(data=True):
        inner = {a[0], b[0]} == {"device"}
        width = 1.2 + 1.1 * math.log2(edge["count"] + 0.5) if inner else 1.6
        colour = NIC if "nic" in (a[0], b[0]) else INK
        _line(axes, places[a], places[b], linewidth=max(width, 1.0), color=colour, alpha=0.75)
        if inner and any(link.count > 1 for link in machine.node.links):
            share = 0.5 if edge["count"] > 1 else 0.4
            x, y = ((1 - share) * p + share * q for p, q in zip(places[a], places[b], strict=True))
            label = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.text(x, y, str(edge["count"]), fontsize=8.5, ha="center", va="center", color=INK, bbox=label, zorder=2)
    word = machine.device.word
    for vertex, at in places.items():
        if vertex[0] == "device":
            text = machine.device.name if count == 1 else f"{word}\n{vertex[1]}"
            size = (1.5, 0.7) if count == 1 else (0.52, 0.44)
            _box(axes, at, size, text, DEVICE, fontsize=11 if count == 1 else 9)
        elif vertex[0] == "nic":
            _box(axes, at, (0.5, 0.24), vertex[1], NIC, fontsize=8)
        else:
            _box(axes, at, (max(0.62 * count * 0.8, 1.2), 0.36), "switch", SWITCH)
    axes.margins(0.06)


def _on_modules(axes: Axes, machine: Machine) -> dict[Any, Point]:
    """Devices on a circle, those of a module side by side, turned so that the lines between modules are short."""
    each, order = machine.device.devices_per_module, _order_on_circle(machine)
    radius = max(2.0, 0.85 * each * len(order) / (2 * math.pi) * 1.35)

    def places(flips: Sequence[int]) -> dict[Any, Point]:
        found: dict[Any, Point] = {}
        for i, (module, flip) in enumerate(zip(order, flips, strict=True)):
            turn = math.pi / 2 - 2 * math.pi * (i + 0.5) / len(order)
            centre = radius * math.cos(turn), radius * math.sin(turn)
            for k in range(each):
                along = (k - (each - 1) / 2) * 0.78 * (-1 if flip else 1)
                spot = centre[0] + along * math.sin(turn), centre[1] - along * math.cos(turn)
                found["device", module * each + k] = spot
        return found

    def length(found: dict[Any, Point]) -> float:
        return sum(math.dist(*(found["device", end] for end in link.between)) for link in machine.node.links)

    tried = product((0, 1), repeat=len(order)) if each > 1 and len(order) <= 8 else [(0,) * len(order)]
    best = min((places(flips) for flips in tried), key=length)
    if each > 1:
        for module in order:
            ends = [best["device", module * each + k] for k in range(each)]
            _line(axes, ends[0], ends[-1], linewidth=46, color=MODULE, zorder=0)
    return best


def _order_on_circle(machine: Machine) -> list[int]:
    """Modules in an order that puts those with most links beside each other."""
    each = machine.device.devices_per_module
    modules = range(machine.devices_per_node // each)

    def joined(a: int, b: int) -> int:
        return sum(
            machine.node.link_count(x, y)
            for x in range(a * each, (a + 1) * each)
            for y in range(b * each, (b + 1) * each)
        )

    order, left = [0], list(modules)[1:]
    while left:
        order.append(max(left, key=lambda m: (joined(order[-1], m), -m)))
        left.remove(order[-1])
    return order


def _place_nics(machine: Machine, places: dict[Any, Point]) -> None:
    nics, kind = machine.node.nics, machine.node.kind
    if kind == "single":
        for k, nic in enumerate(nics):
            turn = 2 * math.pi * k / len(nics)
            places["nic", nic.name] = (1.6 * math.cos(turn), 1.1 * math.sin(turn))
        return
    beside: dict[int, int] = {}
    for nic in nics:
        x, y = places["device", nic.device]
        again = beside.get(nic.device, 0)
        beside[nic.device] = again + 1
        if kind == "switched":
            places["nic", nic.name] = (x, -0.8 - 0.32 * again)
        else:
            far = (math.hypot(x, y) + 0.75 + 0.3 * again) / math.hypot(x, y)
            places["nic", nic.name] = (x * far, y * far)


def _draw_fabric(axes: Axes, machine: Machine) -> None:
    draw: dict[type, Callable[[Axes, Any, Machine], None]] = {
        Dragonfly: _draw_dragonfly,
        FatTree: _draw_fat_tree,
        Torus: _draw_torus,
        UserGraph: _draw_graph,
    }
    draw[type(machine.fabric)](axes, machine.fabric, machine)


def _draw_dragonfly(axes: Axes, fabric: Dragonfly, machine: Machine) -> None:
    """All groups round a circle, and the switches of one of them beside."""
    del machine
    groups, switches = fabric.groups.value, fabric.switches_per_group.value
    places = [_on_circle(i, groups, 1.5) for i in range(groups)]
    _lines(axes, places[1:], linewidth=0.35, color=GLOBAL, alpha=min(1.0, 12 / groups) * 0.5)
    for place in places[1:]:
        _line(axes, places[0], place, linewidth=60 / max(groups, 60), color=GLOBAL, alpha=0.9, zorder=2)
    size = min(90.0, 5000.0 / groups)
    axes.scatter(*zip(*places, strict=True), s=size, color=SWITCH, zorder=3)
    axes.scatter(*places[0], s=size * 1.8, color=NIC, zorder=4)
    axes.text(0, -1.85, f"{groups} groups, joined all to all", ha="center", fontsize=11, color=INK)
    centre = (4.1, 0.0)
    ring = [_on_circle(i, switches, 1.25, centre) for i in range(switches)]
    _lines(axes, ring, linewidth=0.4, color=SWITCH, alpha=0.45)
    axes.scatter(*zip(*ring, strict=True), s=45, color=SWITCH, zorder=3)
    for spot in ring:
        out = centre[0] + (spot[0] - centre[0]) * 1.2, spot[1] * 1.2
        _line(axes, spot, out, linewidth=1.1, color=DEVICE)
    axes.add_patch(_circle(centre, 1.62))
    _line(axes, places[0], (centre[0] - 0.55, 1.52), color=NIC, linewidth=1.0, linestyle="--")
    _line(axes, places[0], (centre[0] - 1.1, -1.19), color=NIC, linewidth=1.0, linestyle="--")
    ports = fabric.endpoints_per_switch.value
    text = f"one group: {switches} switches, joined all to all,\neach with {ports} ports to nodes"
    axes.text(centre[0], -1.95, text, ha="center", va="center", fontsize=11, color=INK)
    axes.set_title("fabric: dragonfly", fontsize=13, color=INK)


def _circle(centre: Point, radius: float) -> Any:
    from matplotlib.patches import Circle

    return Circle(centre, radius, facecolor="none", edgecolor=NIC, linewidth=1.3, linestyle="--")


def _on_circle(number: int, of: int, radius: float, centre: Point = (0.0, 0.0)) -> Point:
    turn = 2 * math.pi * number / of
    return centre[0] + radius * math.cos(turn), centre[1] + radius * math.sin(turn)


def _draw_fat_tree(axes: Axes, fabric: FatTree, machine: Machine) -> None:
    """A few sets of leaves, the planes of spines above them, and the cores."""
    rails, levels = fabric.rails.value, fabric.levels.value
    sets = fabric.sets(machine.node_count)
    drawn = min(sets, 4)
    pitch, colours = 0.34, [DEVICE, NIC, SWITCH, GLOBAL, "#e45756", "#72b7b2", "#eeca3b", "#9d755d"]
    width = rails * pitch + 0.35
    leaves = {
        (s, r): ((s - (drawn - 1) / 2) * width + (r - (rails - 1) / 2) * pitch, 0.0)
        for s in range(drawn)
        for r in range(rails)
    }
    planes = fabric.planes if levels > 1 else 0
    step = min(1.3, drawn * width / max(planes, 1))
    spines = {p: ((p - (planes - 1) / 2) * step, 2.4) for p in range(planes)}
    for (s, r), at in leaves.items():
        colour = colours[r % len(colours)]
        if planes:
            _line(axes, at, spines[r if planes > 1 else 0], color=colour, linewidth=0.9, alpha=0.7)
        foot = (s - (drawn - 1) / 2) * width
        for node in range(3):
            _line(axes, at, (foot + (node - 1) * 0.86, -1.4), color=colour, linewidth=0.7, alpha=0.7)
        axes.scatter(*at, s=110, marker="s", color=colour, zorder=3)
    for s in range(drawn):
        foot = (s - (drawn - 1) / 2) * width
        for node, text in enumerate(("0", "1", "...")):
            named = str(s * fabric.nodes_per_leaf.value + node) if text != "..." else text
            _box(axes, (foot + (node - 1) * 0.86, -1.5), (0.78, 0.42), named, DEVICE, fontsize=8)
    for plane, at in spines.items():
        if levels == 3:
            _line(axes, at, (0.0, 4.2), color=colours[plane % len(colours)], linewidth=1.3)
        text = f"spines\nrail {plane}" if planes > 1 else "spines"
        _box(axes, at, (1.12, 0.62), text, colours[plane % len(colours)] if planes > 1 else SWITCH, fontsize=7.5)
    if levels == 3:
        _box(axes, (0.0, 4.2), (2.2, 0.55), "cores", INK)
    edge = drawn * width / 2
    note = f"{drawn} of {sets} sets of {fabric.nodes_per_leaf.value} nodes, " if sets > drawn else ""
    named = f"{note}{rails} leaves a set, one a rail" if rails > 1 else f"{note}one leaf a set"
    axes.text(0.0, -2.4, f"nodes; {named}", ha="center", fontsize=11, color=INK)
    axes.set_xlim(-edge - 0.3, edge + 0.3)
    axes.set_title(f"fabric: fat tree of {levels} level{'s' * (levels > 1)}", fontsize=13, color=INK)


def _draw_torus(axes: Axes, fabric: Torus, machine: Machine) -> None:
    """Blocks of the first three axes, and one unit of the others where there are more."""
    del machine
    outer = [min(length, 4) for length in fabric.shape[:3]]
    block = fabric.graph([*outer, *(1,) * (len(fabric.shape) - len(outer))])

    def at(place: tuple[int, ...]) -> Point:
        x, y, z = (*place[:3], 0, 0)[:3]
        return x * 0.72 + z * 0.34, y * 0.62 + z * 0.27

    for a, b, axis in block.edges(data="axis"):
        colour = [DEVICE, SWITCH, GLOBAL][fabric.names.index(axis)]
        far = max(abs(p - q) for p, q in zip(a, b, strict=True)) > 1
        _line(axes, at(a), at(b), color=colour, linewidth=1.2, alpha=0.8, linestyle=":" if far else "-")
    for place in block:
        axes.scatter(*at(place), s=34, color=INK, zorder=3)
    for axis, colour in zip(fabric.names[:3], [DEVICE, SWITCH, GLOBAL], strict=False):
        index = fabric.names.index(axis)
        ring = "ring" if fabric.axes[index].ring.value else "line"
        text = f"{axis}: {ring} of {fabric.shape[index]}"
        x, y, z = (*outer, 1, 1)[:3]
        where, side = [
            (_between(at((0, 0, 0)), at((x - 1, 0, 0)), (0.0, -0.25)), "center"),
            (_between(at((0, 0, 0)), at((0, y - 1, 0)), (-0.12, 0.0)), "right"),
            (_between(at((x - 1, 0, 0)), at((x - 1, 0, z - 1)), (0.14, -0.14)), "left"),
        ][index]
        axes.text(*where, text, fontsize=10.5, color=colour, ha=side, va="center")
    if len(fabric.shape) > 3:
        _draw_unit(axes, fabric)
        axes.text(1.5, -0.75, "a corner of the grid; each dot is a unit", ha="center", fontsize=11, color=INK)
    axes.set_title("fabric: torus", fontsize=13, color=INK)


def _between(a: Point, b: Point, shift: Point) -> Point:
    return (a[0] + b[0]) / 2 + shift[0], (a[1] + b[1]) / 2 + shift[1]


def _draw_unit(axes: Axes, fabric: Torus) -> None:
    inner = fabric.shape[3:6]
    unit = fabric.graph([1, 1, 1, *inner, *(1,) * (len(fabric.shape) - 6)])
    colours = [NIC, "#e45756", "#72b7b2"]

    def at(place: tuple[int, ...]) -> Point:
        a, b, c = (*place[3:6], 0, 0)[:3]
        return 5.0 + a * 0.95 + c * 0.42, 0.35 + b * 0.85 + c * 0.34

    for first, second, axis in unit.edges(data="axis"):
        colour = colours[fabric.names.index(axis) - 3]
        p, q = at(first), at(second)
        if max(abs(m - n) for m, n in zip(first, second, strict=True)) > 1:
            from matplotlib.patches import FancyArrowPatch

            bend = "arc3,rad=0.28"
            axes.add_patch(FancyArrowPatch(p, q, connectionstyle=bend, arrowstyle="-", color=colour, linewidth=1.8))
        else:
            _line(axes, p, q, color=colour, linewidth=1.8)
    for place in unit:
        axes.scatter(*at(place), s=95, color=DEVICE, zorder=3)
    words = [
        f"{axis.name}: {'ring' if axis.ring.value else 'line'} of {axis.length.value}" for axis in fabric.axes[3:6]
    ]
    for row, (text, colour) in enumerate(zip(words, colours, strict=False)):
        axes.text(4.75 + row * 0.98, -0.2, text, fontsize=9.5, color=colour, ha="center")
    nodes = math.prod(inner)
    axes.text(5.65, -0.75, f"one unit: {nodes} nodes", ha="center", fontsize=11, color=INK)


def _draw_graph(axes: Axes, fabric: UserGraph, machine: Machine) -> None:
    import networkx as nx

    graph = fabric.graph()
    nodes = [vertex for vertex in graph if vertex.startswith("node:")]
    if graph.number_of_edges() > MOST_EDGES:
        graph = graph.subgraph([vertex for vertex in graph if not vertex.startswith("node:")])
        nodes = []
    places = nx.kamada_kawai_layout(graph) if len(graph) <= 200 else nx.spring_layout(graph, seed=1)
    for a, b, edge in graph.edges(data=True):
        width = 1.0 + 0.8 * math.log2(edge["count"] + 1)
        _line(axes, tuple(places[a]), tuple(places[b]), linewidth=width, alpha=0.6)
    for vertex, spot in places.items():
        is_node = vertex in nodes
        axes.scatter(
            *spot, s=60 if is_node else 220, color=DEVICE if is_node else SWITCH, marker="o" if is_node else "s"
        )
        if len(graph) <= 60:
            text = vertex.removeprefix("node:")
            axes.annotate(text, spot, fontsize=8, color=INK, xytext=(0, 8), textcoords="offset points", ha="center")
    del machine
    axes.set_title("fabric: graph", fontsize=13, color=INK)
    axes.margins(0.1)
