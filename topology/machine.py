"""What a machine is: its devices, how a node joins them, and the fabric between nodes.

A machine is a YAML file of facts; ``topology/machines/`` holds the bundled ones,
and users write their own in the same form. Nothing here is a measurement: what
software achieves on a machine is a calibration.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .errors import InputError, Problem, input_error
from .fabrics import Fabric
from .facts import BandwidthFact, Count, CountFact, Entry, Fact, LatencyFact, PeakFact, PowerFact, SizeFact, facts_in
from .files import build, bundled_names, looks_like_path, read_document
from .units import plural

PACKAGE = "exatwin.topology"
FOLDER = "machines"

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Word = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]*$", max_length=20)]
DeviceNumber = Annotated[int, Field(strict=True, ge=0)]


class Device(Entry):
    """What one rank owns.

    Attributes:
        name: The product, such as ``MI250X GCD``.
        word: What its users call one: GCD, GPU, node.
        devices_per_module: Devices in one package, two on MI250X.
        module_word: What the package is called, where it holds several devices.
        memory: What a program can use.
        peak: By precision, dense, without sparsity; matrix units where there are any.
    """

    name: str = Field(min_length=1, max_length=80)
    word: Word
    devices_per_module: Count = 1
    module_word: Word | None = None
    memory: SizeFact
    memory_bandwidth: BandwidthFact
    peak: dict[Precision, PeakFact] = Field(min_length=1)

    @property
    def words(self) -> str:
        """What its users call several: GCDs, processes."""
        return plural(self.word)

    @property
    def memory_bytes(self) -> float:
        """Memory that a program can use."""
        return self.memory.value

    @property
    def memory_bandwidth_bytes_per_s(self) -> float:
        """Peak rate of the device's own memory."""
        return self.memory_bandwidth.value

    def peak_flop_per_s(self, precision: str) -> float:
        """Peak rate in a precision.

        Raises:
            InputError: If no peak is known; it lists those that are.
        """
        peaks = {str(known): fact for known, fact in self.peak.items()}
        if precision not in peaks:
            raise input_error(f"{self.name} has no peak for {precision}; it has {', '.join(peaks)}", field="precision")
        return peaks[precision].value


class NodeLink(Entry):
    """Cables between two devices of a node.

    Attributes:
        between: The two devices.
        count: How many cables.
        bandwidth: One cable, one direction, where it is not the node's ``link_bandwidth``.
    """

    between: tuple[DeviceNumber, DeviceNumber]
    count: Count
    bandwidth: BandwidthFact | None = None


class Nic(Entry):
    """A network port of a node, and the device it hangs on."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$", max_length=40)
    device: DeviceNumber


class NodeSizeFact(Fact[Annotated[int, Field(strict=True, ge=1, le=1024)]]):
    """How many devices a node has."""


class LinksFact(Fact[tuple[NodeLink, ...]]):
    """Which devices of a node are joined, and by how many cables."""


class NicsFact(Fact[Annotated[tuple[Nic, ...], Field(min_length=1, max_length=1024)]]):
    """The network ports of a node."""


class NumaFact(Fact[tuple[tuple[DeviceNumber, ...], ...]]):
    """Devices next to each NUMA domain of the host, in the order of the domains."""


class Ring(Fact[tuple[DeviceNumber, ...]]):
    """An order of all devices of a node that the vendor's library runs a ring in; it runs backwards too."""

    @property
    def order(self) -> tuple[int, ...]:
        """The devices, each followed by the next and the last by the first."""
        return self.value


class Node(Entry):
    """How one node joins its devices, and how it reaches the fabric.

    Attributes:
        kind: ``point_to_point`` where cables join pairs of devices, ``switched`` where all hang
            on a switch, ``single`` where the node is one device.
        link_bandwidth: One cable, one direction; point_to_point only.
        switch_bandwidth: One device to the switch, one direction; switched only.
        nic_bandwidth: One port, one direction.
        nic_latency: One way through one port, where the vendor prints it.
        rings: Orders that the vendor's library runs rings in; none where it is free to choose.
        numa: Devices next to each NUMA domain of the host.
        host_link: Between one device and the host's memory, one direction, every device at once.
        host_memory_bandwidth: Of the host's memory, all of the node.
    """

    kind: Literal["point_to_point", "switched", "single"]
    devices_fact: NodeSizeFact = Field(alias="devices")
    links_fact: LinksFact | None = Field(default=None, alias="links")
    link_bandwidth: BandwidthFact | None = None
    switch_bandwidth: BandwidthFact | None = None
    nics_fact: NicsFact = Field(alias="nics")
    nic_bandwidth: BandwidthFact
    nic_latency: LatencyFact | None = None
    rings: tuple[Ring, ...] = ()
    numa: NumaFact | None = None
    host_link: BandwidthFact | None = None
    host_memory_bandwidth: BandwidthFact | None = None

    @property
    def devices(self) -> int:
        """Devices of the node."""
        return self.devices_fact.value

    @property
    def links(self) -> tuple[NodeLink, ...]:
        """Pairs of devices that cables join; none unless the node is point_to_point."""
        return self.links_fact.value if self.links_fact else ()

    @property
    def nics(self) -> tuple[Nic, ...]:
        """Ports to the fabric."""
        return self.nics_fact.value

    @property
    def nic_count(self) -> int:
        """Ports to the fabric."""
        return len(self.nics)

    @property
    def nic_bandwidth_bytes_per_s(self) -> float:
        """One port, one direction."""
        return self.nic_bandwidth.value

    @property
    def injection_bytes_per_s(self) -> float:
        """All ports together, one direction."""
        return self.nic_count * self.nic_bandwidth_bytes_per_s

    def link_count(self, a: int, b: int) -> int:
        """Cables between two devices; 0 where they are not joined directly."""
        return sum(link.count for link in self.links if set(link.between) == {a, b})

    def pair_bytes_per_s(self, a: int, b: int) -> float:
        """What two devices can send each other directly, one direction; 0 where they cannot."""
        if self.switch_bandwidth and a != b:
            return self.switch_bandwidth.value
        if self.link_bandwidth is None:
            return 0.0
        return sum(
            link.count * (link.bandwidth or self.link_bandwidth).value
            for link in self.links
            if set(link.between) == {a, b}
        )

    def nics_of(self, device: int) -> tuple[str, ...]:
        """Ports that hang on a device."""
        return tuple(nic.name for nic in self.nics if nic.device == device)


class HoursFact(Fact[Annotated[float, Field(gt=0, le=10_000)]]):
    """Units charged for one hour of one node."""


class Charge(Entry):
    """What the machine's owner charges, in the owner's unit."""

    unit: Literal["node-hour", "GPU-hour"]
    per_node: HoursFact


class NodePower(Entry):
    """Electrical power of one node."""

    idle: PowerFact | None = None
    most: PowerFact


class Machine(Entry):
    """A machine: nodes of devices, and the fabric that joins them.

    Attributes:
        name: What a scenario calls it.
        title: What people call it.
        nodes: Compute nodes.
        charge: What an hour of a node costs.
    """

    name: str = Field(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$", max_length=60)
    title: str = Field(min_length=1, max_length=120)
    note: str | None = None
    nodes: CountFact
    device: Device
    node: Node
    fabric: Fabric
    charge: Charge
    power: NodePower | None = None

    @property
    def node_count(self) -> int:
        """Compute nodes."""
        return self.nodes.value

    @property
    def devices_per_node(self) -> int:
        """Devices of one node."""
        return self.node.devices

    @property
    def device_count(self) -> int:
        """Devices of the whole machine."""
        return self.node_count * self.devices_per_node

    def facts(self) -> Iterator[tuple[str, Fact[Any]]]:
        """Every fact with its dotted path, in the order of the file."""
        return facts_in(self)

    def sources(self) -> list[tuple[str, str]]:
        """Every dotted path with the key of its source."""
        return [(path, fact.source) for path, fact in self.facts()]

    def assumed(self) -> list[str]:
        """Paths of the figures that are guesses."""
        return [path for path, fact in self.facts() if fact.assumed]


def machine_names() -> list[str]:
    """Names of the bundled machines."""
    return bundled_names(PACKAGE, FOLDER)


def load_machine(name_or_path: str) -> Machine:
    """A bundled machine by name, or a user's own by path.

    >>> load_machine("frontier").device_count
    78848

    Raises:
        InputError: If there is no such machine, or its file breaks a rule; it holds every violation.
    """
    document, where = read_document(name_or_path, PACKAGE, FOLDER, "machine")
    return machine_from_document(document, where)


def machine_from_document(document: dict[str, Any], where: str = "") -> Machine:
    """A machine from the fields of a machine file.

    Args:
        document: The fields.
        where: The name that errors carry.

    Raises:
        InputError: With every violation.
    """
    machine = build(Machine, _with_graph_beside(document, where), where)
    problems = [
        *_device_problems(machine),
        *_node_problems(machine.node),
        *machine.fabric.problems(machine.node_count, machine.node.nic_count),
    ]
    if problems:
        raise InputError(where, problems)
    return machine


def _with_graph_beside(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields, with the path of a graph file taken from the machine file's folder."""
    fabric = document.get("fabric")
    if not (isinstance(fabric, dict) and isinstance(fabric.get("file"), str) and looks_like_path(where)):
        return document
    return document | {"fabric": fabric | {"file": str(Path(where).expanduser().parent / fabric["file"])}}


def _device_problems(machine: Machine) -> Iterator[Problem]:
    device, devices = machine.device, machine.devices_per_node
    if devices % device.devices_per_module:
        message = f"{device.devices_per_module} devices a module do not divide the {devices} devices of a node"
        yield Problem("device.devices_per_module", message)
    if device.devices_per_module > 1 and device.module_word is None:
        yield Problem("device.module_word", f"is needed where a module holds {device.devices_per_module} devices")


# What joins the devices of a node of each kind.
_JOINED_BY = {"point_to_point": ("links", "link_bandwidth"), "switched": ("switch_bandwidth",), "single": ()}


def _node_problems(node: Node) -> Iterator[Problem]:
    devices = node.devices
    if (devices == 1) != (node.kind == "single"):
        yield Problem("node.kind", f"{node.kind} does not go with {_counted(devices, 'device')}")
    parts = {
        "links": node.links_fact,
        "link_bandwidth": node.link_bandwidth,
        "switch_bandwidth": node.switch_bandwidth,
    }
    for field, part in parts.items():
        needed, given = field in _JOINED_BY[node.kind], part is not None
        if needed and not given:
            yield Problem(f"node.{field}", f"is needed where the node is {node.kind}")
        elif given and not needed:
            yield Problem(f"node.{field}", f"does not belong to a node that is {node.kind}")
    yield from _link_problems(node)
    names = [nic.name for nic in node.nics]
    for index, nic in enumerate(node.nics):
        if nic.device >= devices:
            yield _unknown_device(f"node.nics.value.{index}.device", nic.device, devices)
        if nic.name in names[:index]:
            yield Problem(f"node.nics.value.{index}.name", f"{nic.name} stands twice")
    yield from _ring_problems(node)
    if node.numa:
        yield from _numa_problems(node.numa.value, devices)


def _link_problems(node: Node) -> Iterator[Problem]:
    if node.links_fact is None:
        return
    devices = node.devices
    seen: set[frozenset[int]] = set()
    for index, link in enumerate(node.links):
        field = f"node.links.value.{index}.between"
        a, b = link.between
        for device in sorted({a, b}):
            if device >= devices:
                yield _unknown_device(field, device, devices)
        if a == b:
            yield Problem(field, f"joins device {a} to itself")
        elif frozenset(link.between) in seen:
            yield Problem(field, f"devices {a} and {b} stand in an earlier link; give the cables one count")
        seen.add(frozenset(link.between))
    apart = _apart(devices, seen)
    if apart:
        yield Problem("node.links.value", f"no way leads from device 0 to {', '.join(map(str, apart))}")


def _apart(devices: int, links: set[frozenset[int]]) -> list[int]:
    """Devices that cannot be reached from device 0."""
    neighbours: dict[int, set[int]] = {device: set() for device in range(devices)}
    for link in links:
        for device in link & neighbours.keys():
            neighbours[device] |= link & neighbours.keys()
    reached, fresh = {0}, [0]
    while fresh:
        found = neighbours[fresh.pop()] - reached
        reached |= found
        fresh += found
    return [device for device in range(devices) if device not in reached]


def _ring_problems(node: Node) -> Iterator[Problem]:
    for index, ring in enumerate(node.rings):
        field = f"node.rings.{index}.value"
        if sorted(ring.order) != list(range(node.devices)):
            yield Problem(field, f"is no order of devices 0 to {node.devices - 1}, each once")
        elif node.kind == "point_to_point" and ring.note is None:
            # Where a library does hop over a device, the fact's note has to say so.
            gaps = [f"{a}-{b}" for a, b in pairwise((*ring.order, ring.order[0])) if not node.link_count(a, b)]
            if gaps:
                yield Problem(field, f"has no link for {', '.join(gaps)}; if it hops over devices, say so in a note")


def _numa_problems(domains: tuple[tuple[int, ...], ...], devices: int) -> Iterator[Problem]:
    placed = sorted(device for domain in domains for device in domain)
    if placed != list(range(devices)):
        yield Problem("node.numa.value", f"has to hold each of devices 0 to {devices - 1} once, but holds {placed}")


def _unknown_device(field: str, device: int, devices: int) -> Problem:
    return Problem(field, f"there is no device {device}; the node has 0 to {devices - 1}")


def _counted(count: int, word: str) -> str:
    return f"{count} {word if count == 1 else plural(word)}"
