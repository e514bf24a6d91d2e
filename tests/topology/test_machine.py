"""The bundled machines say what their vendors printed, and a wrong file says all that is wrong with it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import combinations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exatwin.topology.errors import InputError
from exatwin.topology.files import read_document
from exatwin.topology.machine import Machine, load_machine, machine_from_document, machine_names

BUNDLED = [
    *("alps", "aurora", "aws-p5", "dgx-b200", "dgx-h100", "dgx-h200", "frontier", "fugaku", "gb200-nvl72"),
    *("gpt-neox-a100-40", "jean-zay-a100", "jean-zay-v100", "jean-zay-v100-16", "local", "lumi-g", "mi300x-node"),
    *("mosaic-a100", "mosaic-a100-40", "mosaic-h100", "selene", "vtrain-a100"),
]


def document(name="frontier"):
    return copy.deepcopy(read_document(name, "exatwin.topology", "machines", "machine")[0])


def problems(fields):
    with pytest.raises(InputError) as caught:
        machine_from_document(fields, "mine")
    return [str(problem) for problem in caught.value.problems]


def changed(path, value, name="frontier"):
    """A bundled machine's fields with one of them set, or left out where the value is ``...``."""
    fields = document(name)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = fields
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return fields


def test_the_bundled_machines_are_these():
    assert machine_names() == BUNDLED


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_machine_goes_by_its_file_name_and_cites_each_figure(name):
    machine = load_machine(name)
    assert machine.name == name
    assert len(machine.sources()) >= 15
    for path, fact in machine.facts():
        assert fact.at or fact.assumed, f"{path} does not say where in {fact.source} it stands"


@pytest.mark.parametrize("name", BUNDLED)
def test_every_assumed_figure_says_what_it_rests_on(name):
    machine = load_machine(name)
    facts = dict(machine.facts())
    assert all(facts[path].note for path in machine.assumed())


def test_frontier_is_what_its_guide_prints():
    machine = load_machine("frontier")
    assert (machine.node_count, machine.devices_per_node, machine.device_count) == (9856, 8, 78848)
    assert (machine.device.word, machine.device.devices_per_module) == ("GCD", 2)
    assert machine.device.memory_bytes == 64 * 2**30
    assert machine.device.memory_bandwidth_bytes_per_s == pytest.approx(1.6e12)
    assert machine.device.peak_flop_per_s("bf16") == pytest.approx(191.5e12)
    assert machine.node.injection_bytes_per_s == pytest.approx(100e9)
    assert machine.power is not None
    assert machine.power.most.value == pytest.approx(2.73e3, rel=0.01)


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_an_mi250x_node_has_four_two_or_one_links_between_its_gcds(name):
    node = load_machine(name).node
    joined = {pair: node.link_count(*pair) for pair in combinations(range(8), 2) if node.link_count(*pair)}
    assert {pair for pair, count in joined.items() if count == 4} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {pair for pair, count in joined.items() if count == 2} == {(0, 6), (2, 4)}
    assert {pair for pair, count in joined.items() if count == 1} == {(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)}
    assert node.pair_bytes_per_s(1, 0) == pytest.approx(200e9)
    assert node.pair_bytes_per_s(0, 7) == 0
    assert [nic.device for nic in node.nics] == [1, 3, 5, 7]
    assert node.nics_of(3) == ("hsn1",)


def test_every_module_has_five_links_to_other_modules_as_lumi_says():
    node = load_machine("lumi-g").node
    for module in range(4):
        own = {2 * module, 2 * module + 1}
        assert sum(link.count for link in node.links if len(own & set(link.between)) == 1) == 5


def test_rccl_and_lumi_document_the_same_two_rings():
    def undirected(machine):
        return {
            frozenset(frozenset(pair) for pair in zip(ring.order, (*ring.order[1:], ring.order[0]), strict=True))
            for ring in machine.node.rings
        }

    assert undirected(load_machine("frontier")) == undirected(load_machine("lumi-g"))


def test_fugaku_is_one_device_a_node_with_six_ports():
    machine = load_machine("fugaku")
    assert (machine.device_count, machine.devices_per_node, machine.device.word) == (158_976, 1, "node")
    assert machine.device.memory_bytes == 30_739_333_120
    assert machine.device.peak_flop_per_s("fp32") * machine.node_count == pytest.approx(977e15, rel=1e-3)
    assert machine.node.injection_bytes_per_s == pytest.approx(40.8e9)


@pytest.mark.parametrize(("name", "per_device", "injection"), [("selene", 300e9, 200e9), ("dgx-h100", 450e9, 400e9)])
def test_a_dgx_joins_eight_gpus_by_a_switch_and_eight_ports(name, per_device, injection):
    machine = load_machine(name)
    assert machine.node.pair_bytes_per_s(0, 7) == per_device
    assert machine.node.pair_bytes_per_s(3, 3) == 0
    assert machine.node.link_count(0, 7) == 0
    assert machine.node.injection_bytes_per_s == pytest.approx(injection)


def test_sites_charge_in_their_own_units():
    charges = {name: load_machine(name).charge for name in ("frontier", "lumi-g")}
    assert (charges["frontier"].unit, charges["frontier"].per_node.value) == ("node-hour", 1)
    assert (charges["lumi-g"].unit, charges["lumi-g"].per_node.value) == ("GPU-hour", 4)


def test_a_precision_without_a_peak_lists_those_that_have_one():
    with pytest.raises(InputError, match="A64FX has no peak for bf16; it has fp32, fp16"):
        load_machine("fugaku").device.peak_flop_per_s("bf16")


def test_a_machine_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_machine("frontier").title = "mine"  # type: ignore[misc]


def test_a_machine_of_ones_own_is_read_from_any_format(tmp_path):
    fields = changed("name", "mine")
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fields))
    machines = [load_machine(str(tmp_path / f"mine.{ending}")) for ending in ("json", "yaml")]
    assert machines[0] == machines[1]
    assert machines[0].name == "mine"


def test_the_schema_has_readable_names_and_accepts_every_bundled_machine():
    jsonschema = pytest.importorskip("jsonschema")
    schema = Machine.model_json_schema()
    assert all(name.isalnum() for name in schema["$defs"])
    for name in BUNDLED:
        jsonschema.validate(document(name), schema)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("device.memory", "64 GB", "device.memory: a figure needs its source; write it like {value: 64 GB,"),
        ("device.memory.value", 64, "device.memory.value: size 64 has no unit; write it like '64 GiB' or '64 GB'"),
        ("device.memory.value", "-64 GB", "device.memory.value: size '-64 GB' must be finite and not negative"),
        ("device.memory.value", "0 GB", "device.memory.value: input should be greater than 0"),
        ("device.memory.source", "OLCF guide", "device.memory.source: string should match pattern"),
        ("device.memory", {"value": "64 GB", "source": "assumed"}, "device.memory: an assumed figure needs a note"),
        ("device.memory.sorce", "x", "device.memory.sorce: unknown key; did you mean source?"),
        ("device.word", "two words", "device.word: string should match pattern"),
        ("device.word", "", "device.word: string should match pattern"),
        ("device.peak", {}, "device.peak: dictionary should have at least 1 item"),
        (
            "device.peak.fp4",
            {"value": "1 TFLOP/s", "source": "x"},
            "device.peak.fp4: input should be 'fp32', 'fp16', 'bf16' or 'fp8'",
        ),
        ("device.peak.fp16.value", "191.5 TB/s", "device.peak.fp16.value: rate '191.5 TB/s' has an unknown unit"),
        ("device.devices_per_module", 3, "device.devices_per_module: 3 devices a module do not divide the 8 devices"),
        ("device.module_word", ..., "device.module_word: is needed where a module holds 2 devices"),
        ("name", "Frontier 2", "name: string should match pattern"),
        ("nodes.value", 0, "nodes.value: input should be greater than 0"),
        ("nodes.value", -3, "nodes.value: input should be greater than 0"),
        ("nodes.value", 9856.0, "nodes.value: input should be a valid integer"),
        ("nodes.value", True, "nodes.value: input should be a valid integer"),
        ("nodes.value", 10**12, "nodes.value: input should be less than or equal to 1000000000"),
        ("node", 3, "node: a mapping of fields is needed, but it is 3"),
        ("node.kind", "mesh", "node.kind: input should be 'point_to_point', 'switched' or 'single'"),
        ("node.kind", "switched", "node.switch_bandwidth: is needed where the node is switched"),
        ("node.kind", "switched", "node.links: does not belong to a node that is switched"),
        ("node.kind", "single", "node.kind: single does not go with 8 devices"),
        ("node.link_bandwidth", ..., "node.link_bandwidth: is needed where the node is point_to_point"),
        ("node.devices.value", 7, "node.links.value.3.between: there is no device 7; the node has 0 to 6"),
        ("node.devices.value", 9, "node.links.value: no way leads from device 0 to 8"),
        ("node.links.value.0.between", [0, 0], "node.links.value.0.between: joins device 0 to itself"),
        ("node.links.value.1.between", [1, 0], "node.links.value.1.between: devices 1 and 0 stand in an earlier link"),
        ("node.links.value.1.between", [1], "node.links.value.1.between"),
        (
            "node.links.value.0.between",
            [-1, 0],
            "node.links.value.0.between.0: input should be greater than or equal to 0",
        ),
        ("node.links.value.0.count", 0, "node.links.value.0.count: input should be greater than 0"),
        ("node.nics.value", [], "node.nics.value: tuple should have at least 1 item"),
        ("node.nics.value.0.device", 8, "node.nics.value.0.device: there is no device 8"),
        ("node.nics.value.1.name", "hsn0", "node.nics.value.1.name: hsn0 stands twice"),
        ("node.nic_bandwidth.value", "25 GB", "node.nic_bandwidth.value: bandwidth '25 GB' has an unknown unit"),
        ("node.rings.0.value", [0, 1, 2], "node.rings.0.value: is no order of devices 0 to 7, each once"),
        ("node.rings.0.value", [], "node.rings.0.value: is no order of devices 0 to 7, each once"),
        ("node.rings.0.value", [0, 1, 2, 3, 4, 5, 6, 7], "node.rings.0.value: has no link for 1-2, 3-4, 5-6, 7-0"),
        ("node.numa.value", [[0, 1], [2, 3]], "node.numa.value: has to hold each of devices 0 to 7 once"),
        (
            "fabric.kind",
            "star",
            "fabric.kind: has to be one of 'dragonfly', 'fat_tree', 'torus', 'graph', but it is 'star'",
        ),
        ("fabric.kind", ..., "fabric.kind: is needed and missing"),
        ("fabric.group", 1, "fabric.group: unknown key; did you mean groups?"),
        (
            "fabric.groups.value",
            80,
            "fabric.groups.value: 9856 nodes in groups of 128 leave some of 80 groups empty; use 77",
        ),
        ("fabric.groups.value", 76, "fabric.group_nodes.value: a group of 256 nodes with 4 NICs each needs 1024 ports"),
        ("charge.unit", "euros", "charge.unit: input should be 'node-hour' or 'GPU-hour'"),
        ("charge.per_node.value", float("inf"), "charge.per_node.value: input should be less than or equal to 10000"),
        ("charge.per_node.value", float("nan"), "charge.per_node.value: input should be"),
    ],
)
def test_a_mistake_is_named_with_the_rule_and_the_number(path, value, said):
    found = problems(changed(path, value))
    assert any(problem.startswith(said) for problem in found), found


@pytest.mark.parametrize("part", ["name", "title", "nodes", "device", "node", "fabric", "charge"])
def test_a_part_that_is_missing_is_asked_for(part):
    assert problems(changed(part, ...)) == [f"{part}: is needed and missing"]


def test_a_ring_may_hop_over_devices_where_a_note_says_so():
    fields = changed("node.rings.0.value", [0, 1, 2, 3, 4, 5, 6, 7])
    fields["node"]["rings"][0]["note"] = "The library hops over a device here."
    assert machine_from_document(fields).node.rings[0].order == tuple(range(8))


def test_all_mistakes_are_reported_at_once():
    fields = document()
    fields["node"]["links"]["value"].append({"between": [0, 0], "count": 1})
    fields["node"]["nics"]["value"][0]["device"] = 99
    fields["device"]["devices_per_module"] = 3
    fields["fabric"]["groups"]["value"] = 80
    assert [line.split(":")[0] for line in problems(fields)] == [
        "device.devices_per_module",
        "node.links.value.12.between",
        "node.nics.value.0.device",
        "fabric.groups.value",
    ]


def test_torus_and_fat_tree_have_to_hold_the_nodes():
    assert problems(changed("nodes.value", 158_975, "fugaku")) == [
        "fabric.axes: 24x23x24x2x3x2 makes 158976 nodes, but there are 158975"
    ]
    assert problems(changed("fabric.axes.1.name", "x", "fugaku")) == ["fabric.axes: axis x stands 2 times"]
    assert problems(changed("fabric.rails.value", 3, "selene")) == [
        "fabric.rails.value: 3 rails do not share 8 NICs a node evenly"
    ]
    assert problems(changed("fabric.levels.value", 1, "selene")) == [
        "fabric.levels.value: one level holds 20 nodes, but there are 560"
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATHS = [
    "nodes",
    "nodes.value",
    "device",
    "device.peak",
    "node",
    "node.links.value",
    "node.nics",
    "node.rings",
    "fabric",
]


@given(st.sampled_from(PATHS), JSON, st.sampled_from(BUNDLED))
def test_any_value_anywhere_gives_a_machine_or_an_input_error(path, value, name):
    try:
        fields = changed(path, value, name)
    except KeyError:  # this machine has no such part
        return
    try:
        machine_from_document(fields)
    except InputError as error:
        assert error.problems


def test_loading_a_machine_imports_neither_networkx_nor_simpy():
    code = (
        "import sys; from exatwin.topology.machine import load_machine; load_machine('frontier'); "
        "import exatwin.topology.graph; "
        "print([name for name in ('networkx', 'simpy', 'torch', 'click') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
