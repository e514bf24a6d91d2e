"""Reading a scenario: what is right comes back whole, what is wrong is said once and at once."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from exatwin.scenarios.framework import load_framework
from exatwin.scenarios.scenario import (
    ScenarioFile,
    load_scenario,
    scenario_from_document,
    scenario_names,
    scenario_warnings,
)
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine

SMALL: dict[str, Any] = {
    "name": "small",
    "machine": "frontier",
    "devices": 64,
    "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50257},
    "training": {"seq_len": 1024, "global_batch": 64, "precision": "bf16"},
    "layout": {"tp": 4, "pp": 4, "micro_batch": 2},
}


def changed(**fields: Any) -> dict[str, Any]:
    """The small scenario with fields replaced; ``layout__tp`` is ``layout.tp``, and ... takes a field out."""
    document = copy.deepcopy(SMALL)
    for key, value in fields.items():
        *path, last = key.split("__")
        here = document
        for part in path:
            here = here[part]
        here.pop(last, None)
        if value is not ...:
            here[last] = value
    return document


def problems(document: dict[str, Any], *overrides: str) -> list[str]:
    with pytest.raises(InputError) as error:
        scenario_from_document(document, "s.yaml", overrides)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize("name", scenario_names())
def test_every_bundled_scenario_is_whole_and_can_be_read_back(name):
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.devices == scenario.layout.model_parallel * scenario.layout.dp
    assert scenario.training.global_batch == scenario.micro_batches * scenario.layout.micro_batch * scenario.dp
    document = json.loads(json.dumps(scenario.document(), allow_nan=False))
    assert scenario_from_document(document) == scenario


def test_the_trillion_parameter_run_is_384_nodes_of_8_gcds():
    scenario = load_scenario("frontier-1t")
    assert (scenario.devices, scenario.nodes, scenario.layout.dp, scenario.micro_batches) == (3072, 384, 6, 1600)
    assert scenario.tokens_per_step == 9600 * 2048
    assert scenario.training.tokens == 20e12


def test_devices_follow_from_nodes_or_replicas():
    assert scenario_from_document(changed(devices=..., nodes=8)).layout.dp == 4
    assert scenario_from_document(changed(devices=..., layout__dp=2)).devices == 32
    assert scenario_from_document(changed(devices=64, nodes=8)).nodes == 8
    assert scenario_from_document(changed(devices=4, layout__pp=1)).nodes == 1


ONE_MISTAKE = [
    ({"layout__tp": 3, "devices": 48}, [], ["tp=3", "16 attention heads", "tp can be 1, 2, 4, 8, 16"]),
    ({"layout__tp": 8, "model__ffn": 4100}, [], ["tp=8", "ffn", "4100", "tp can be 1, 2, 4"]),
    ({"model__kv_heads": 2}, [], ["tp=4", "2 key and value heads", "megatron-deepspeed", "tp can be 1, 2"]),
    ({"layout__pp": 16, "devices": 256}, [], ["pp=16", "8 layers", "1, 2, 4, 8"]),
    ({"model__layers": 10}, [], ["pp=4", "10 layers", "1, 2, 5, 10", "stage_layers"]),
    ({"layout__stage_layers": [2, 2, 2, 1]}, [], ["adds up to 7", "8"]),
    ({"layout__stage_layers": [4, 4]}, [], ["2 entries", "pp=4", "pp=2"]),
    ({"layout__recompute": ["full", "none"]}, [], ["2 entries", "pp=4"]),
    ({"devices": 72}, [], ["devices=72", "= 16", "64, 80"]),
    ({"layout__dp": 2}, [], ["devices=64", "= 32", "dp=4"]),
    ({"nodes": 9}, [], ["devices=64", "nodes=9", "72", "nodes=8"]),
    ({"devices": ...}, [], ["missing", "nodes"]),
    ({"devices": 80_000, "training__global_batch": 10_000}, [], ["80000", "more than the 78848 GCDs"]),
    (
        {"devices": 12, "layout__tp": 4, "layout__pp": 1, "training__global_batch": 66},
        [],
        ["whole number of nodes", "8, 16"],
    ),
    ({"training__global_batch": 65}, [], ["global_batch=65", "2 x 4 = 8", "64, 72"]),
    ({"training__global_batch": 4}, [], ["global_batch=4", "8"]),
    ({"layout__ep": 2}, [], ["ep=2", "has none"]),
    ({"layout__cp": 2, "training__seq_len": 2046}, [], ["2 x cp = 2 x 2 = 4", "seq_len=2046", "cp can be 1"]),
    ({"layout__zero": 3}, [], ["zero=3", "zero=0, 1", "fsdp2"]),
    ({"layout__schedule": "zb-h3"}, [], ["zb-h3", "did you mean zb-h1?", ".csv"]),
    ({"layout__schedule": "zb-v"}, [], ["layout.vpp", "vpp=1", "zb-v; it can be 2"]),
    ({"layout__schedule": "interleaved"}, [], ["layout.vpp", "vpp=1", "2 or more, or schedule 1f1b"]),
    ({"layout__schedule": "./nowhere.csv"}, [], ["layout.schedule", "nowhere.csv", "no such file"]),
    ({"training__precision": "fp64"}, [], ["fp64", "fp32"]),
    ({"machine": "frontir"}, [], ["frontir", "did you mean frontier?"]),
    ({"machine": "./nowhere.yaml"}, [], ["nowhere.yaml", "no such file"]),
    ({"framework": "megatrn"}, [], ["megatron"]),
    ({"model": "gpt-175"}, [], ["did you mean gpt-175b?"]),
    ({"model": 3}, [], ["bundled name"]),
    ({"model": ...}, [], ["missing"]),
    ({"training": ...}, [], ["missing"]),
    ({"training": 3}, [], ["training"]),
    ({"layout": [1]}, [], ["layout"]),
    ({"laout": {}}, [], ["did you mean layout?"]),
    ({"layout__recompte": "full"}, [], ["did you mean recompute?"]),
    ({"name": ""}, [], ["name"]),
    ({"name": 3}, [], ["name"]),
    ({"devices": 64.0}, [], ["devices"]),
    ({"devices": True}, [], ["devices"]),
    ({"devices": -64}, [], ["devices"]),
    ({"devices": 10**30}, [], ["devices"]),
    ({"model__max_positions": 512}, [], ["seq_len=1024", "512"]),
    (
        {
            "layout__pp": 32,
            "model__layers": 32,
            "training__global_batch": 1_000_000,
            "devices": 128,
            "layout__micro_batch": 1,
        },
        [],
        ["64000000 passes", "at most"],
    ),
    ({}, ["layout.tp=x"], ["--set", "'x'"]),
    ({}, ["layout.tp"], ["key=value", "layout.tp=4"]),
    ({}, ["=4"], ["empty key"]),
    ({}, ["layout..tp=4"], ["empty key"]),
    ({}, ["layout.tp.x=3"], ["layout.tp is 4", "no field x"]),
    ({}, ["lay.tp=3"], ["unknown key lay", "layout"]),
    ({}, ["layout.tp=[1"], ["not valid YAML"]),
    ({"layout__stage_layers": [2, 2, 2, 2]}, ["layout.stage_layers.4=2"], ["entries 0 to 3"]),
    ({"model": "gpt-22"}, ["model.layers=4"], ["did you mean gpt-22b?"]),
]


@pytest.mark.parametrize(("fields", "overrides", "said"), ONE_MISTAKE, ids=[str(i) for i in range(len(ONE_MISTAKE))])
def test_one_mistake_has_one_message_with_its_numbers_and_a_way_out(fields, overrides, said):
    with pytest.raises(InputError) as error:
        scenario_from_document(changed(**fields), "s.yaml", overrides)
    assert len(error.value.problems) == 1, str(error.value)
    text = str(error.value)
    assert text.startswith("s.yaml") and "\n" not in text
    assert [part for part in said if part not in text] == [], text


def test_all_mistakes_are_said_at_once():
    document = changed(
        layout__tp=3,
        layout__bogus=1,
        model__vocab=0,
        training__tokens="x",
        framework="none",
        colour="red",
    )
    found = {text.split(":")[0] for text in problems(document)}
    assert found == {"layout.bogus", "model.vocab", "training.tokens", "framework", "colour", "devices"}


def test_rules_of_the_parts_that_are_right_are_checked_beside_parts_that_are_wrong():
    found = problems(changed(layout__tp=3, layout__bogus=1, training__seq_len=-1))
    assert any("tp=3 does not divide the 16 attention heads" in text for text in found)
    assert len(found) == 4  # heads, the unknown key, seq_len, and 64 devices in replicas of 12


def test_frameworks_differ_about_key_and_value_heads():
    document = changed(model__kv_heads=2)
    assert scenario_from_document(document | {"framework": "megatron"}).model.kv_heads == 2
    assert "as megatron-deepspeed needs" in problems(document)[0]


def test_the_device_must_compute_in_the_precision():
    found = problems(changed(machine="fugaku"))
    assert any("has no peak for bf16; it has" in text for text in found)


def test_overrides_replace_fields_also_in_a_model_given_by_name():
    scenario = load_scenario(
        "frontier-1t", ["model.layers=64", "layout.recompute=none", "devices=1024", "training.tokens="]
    )
    assert scenario.model.layers == 64 and scenario.model.hidden == 25600
    assert scenario.model.name == "gpt-1t (changed)"
    assert scenario.layout.dp == 2 and scenario.training.tokens is None
    assert load_scenario("fugaku-13b", ["layout.recompute.7=full"]).layout.recompute_by_stage()[7] == "full"
    assert load_scenario("frontier-1t", ["model=gpt-175b", "layout.pp=32"]).model.name == "gpt-175b"


def test_an_error_names_the_options_that_were_given():
    with pytest.raises(InputError, match=r"^frontier-1t --set layout\.tp=6: layout\.tp: tp=6"):
        load_scenario("frontier-1t", ["layout.tp=6"])
    with pytest.raises(InputError) as error:
        load_scenario("frontier-1t", ["layout.tp", "a.b=1"])
    assert [p.field for p in error.value.problems] == ["--set layout.tp", "--set a.b=1"]


def test_paths_in_a_file_start_at_the_file(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "model.yaml").write_text(yaml.safe_dump(SMALL["model"]))
    framework = load_framework("megatron").model_dump(mode="json") | {"name": "mine"}
    (tmp_path / "deep" / "framework.json").write_text(json.dumps(framework))
    document = changed(model="./model.yaml", framework="./framework.json", calibration="./c.yaml", name=...)
    path = tmp_path / "deep" / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    scenario = load_scenario("deep/mine.yaml")
    assert (scenario.name, scenario.model.layers, scenario.framework.name) == ("mine", 8, "mine")
    assert scenario.calibration == "deep/c.yaml"
    assert scenario_from_document(scenario.document()) == scenario


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("tokens", "deep/tokens"),
        (" ../all.npy ", "deep/../all.npy"),
        ("/data/all.bin", "/data/all.bin"),
        ("~/x.txt", "~/x.txt"),
    ],
)
def test_the_training_data_stand_beside_the_file_that_names_them(tmp_path, monkeypatch, written, read):
    """Every name is a path, also one without a suffix; what an override names starts at the working directory."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.yaml").write_text(yaml.safe_dump(changed(training__data=written)))
    monkeypatch.chdir(tmp_path)
    scenario = load_scenario("deep/mine.yaml")
    assert scenario.training.data == read
    assert scenario_from_document(scenario.document()) == scenario
    assert load_scenario("deep/mine.yaml", ["training.data=here.txt"]).training.data == "here.txt"
    assert load_scenario("deep/mine.yaml", ["training.data=null"]).training.data is None


@pytest.mark.parametrize("data", ["", "  ", 3, ["a.txt"]])
def test_training_data_of_no_name_are_refused(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(changed(training__data=data)))
    with pytest.raises(InputError, match=r"training\.data"):
        load_scenario(str(path))


@pytest.mark.parametrize("suffix", ["json", "toml", "yml"])
def test_json_and_toml_say_the_same(tmp_path, suffix):
    path = tmp_path / f"small.{suffix}"
    if suffix == "toml":
        lines = ['name = "small"', 'machine = "frontier"', "devices = 64"]
        for table in ("model", "training", "layout"):
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in SMALL[table].items())]
        path.write_text("\n".join(lines))
    else:
        path.write_text(json.dumps(SMALL))
    assert load_scenario(str(path)) == scenario_from_document(SMALL)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x00\x01\x02", "binary"),
        (b"\xff\xfe\xfd", "UTF-8"),
        (b"[1, 2]", "a list"),
        (b"just words", "a text"),
        (b"name: [1, 2", "not valid YAML"),
        (b"a: 1\na: 2", "twice"),
        (b"a: &a [*a]", "aliases"),
        (b"x: 0x" + b"f" * 5000, "digits"),
        (b"[" * 3000, "YAML"),
        (b"a: " + b"[" * 200 + b"]" * 200, "nested more than"),
    ],
    ids=[
        "empty",
        "blank",
        "binary",
        "latin",
        "list",
        "text",
        "cut",
        "twice",
        "itself",
        "huge",
        "deep",
        "deep2",
    ],
)
def test_a_file_that_is_no_scenario_is_one_clear_line(tmp_path, content, said):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        load_scenario(str(path))
    assert len(error.value.problems) == 1 and "bad.yaml" in str(error.value)


@pytest.mark.parametrize(
    "name", ["", " ", "nope", "no/pe", "a" * 5000, "a\0b", "~nobody/x.yaml", "a/\0.yaml", "é✓", ".", "..", "/"]
)
def test_a_name_that_is_no_scenario_is_refused(name):
    with pytest.raises(InputError):
        load_scenario(name)


def test_a_directory_is_no_scenario(tmp_path):
    with pytest.raises(InputError, match="directory"):
        load_scenario(str(tmp_path))


def test_what_is_allowed_and_seldom_meant_is_a_warning():
    assert scenario_warnings(load_scenario("frontier-1t")) == ()
    wide = scenario_from_document(changed(layout__tp=16, layout__pp=1, layout__zero=1, devices=16))
    assert any("tp=16 is wider than a node of 8 GCDs" in text for text in scenario_warnings(wide))
    assert any("zero=1 shards nothing" in text for text in scenario_warnings(wide))
    short = scenario_from_document(changed(training__global_batch=8))
    assert any("1 micro-batches a replica never fill 4 stages" in text for text in scenario_warnings(short))
    assert not any("wider" in text for text in scenario_warnings(load_scenario("fugaku-30b")))


def test_the_schema_accepts_every_bundled_scenario_and_refuses_a_slip():
    schema = ScenarioFile.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in scenario_names():
        validator.validate(json.loads(json.dumps(load_scenario(name).document())))
    validator.validate(SMALL)
    for slip in ({"layout__tp": "8"}, {"layout__bogus": 1}, {"model": 3}, {"devices": 0}, {"layout__recompute": "ful"}):
        assert not validator.is_valid(changed(**slip)), slip


def test_reading_a_scenario_needs_no_simulator():
    script = (
        "import sys, exatwin.scenarios.scenario as s; s.load_scenario('frontier-1t');"
        "print([m for m in ('networkx', 'simpy', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@st.composite
def valid_documents(draw: st.DrawFn) -> dict[str, Any]:
    """Random scenarios that keep every rule."""
    machine = draw(st.sampled_from(["frontier", "lumi-g", "fugaku", "selene"]))
    tp, pp, dp = (
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.sampled_from([1, 2, 8])),
    )
    layers = pp * draw(st.integers(1, 4))
    stage_layers = None
    if draw(st.booleans()):
        stage_layers = draw(st.lists(st.integers(1, 5), min_size=pp, max_size=pp))
        layers = sum(stage_layers)
    heads = tp * draw(st.integers(1, 4))
    micro_batch = draw(st.integers(1, 4))
    recompute = st.sampled_from(["none", "selective", "full"])
    fugaku = machine == "fugaku"
    document = {
        "name": draw(st.text(min_size=1, max_size=20).filter(lambda text: text.strip() and text.isprintable())),
        "machine": machine,
        "devices": tp * pp * dp,
        "model": {
            "layers": layers,
            "hidden": heads * draw(st.sampled_from([64, 80, 128])),
            "heads": heads,
            "vocab": draw(st.integers(1, 300_000)),
            "gated": draw(st.booleans()),
            "tied": draw(st.booleans()),
            "bias": draw(st.booleans()),
            "positions": draw(st.sampled_from(["learned", "rotary", "alibi"])),
            "norm": draw(st.sampled_from(["layer", "rms"])),
            "embedding_norm": draw(st.booleans()),
        },
        "training": {
            "seq_len": draw(st.integers(1, 8192)),
            "global_batch": micro_batch * dp * draw(st.integers(1, 40)),
            "precision": "fp32" if fugaku else draw(st.sampled_from(["fp16", "bf16"])),
            "tokens": draw(st.none() | st.floats(1e6, 1e15)),
            "hidden_dropout": draw(st.floats(0, 0.9)),
        },
        "layout": {
            "tp": tp,
            "pp": pp,
            "micro_batch": micro_batch,
            "zero": draw(st.integers(0, 1)),
            "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
            "recompute": draw(recompute | st.lists(recompute, min_size=pp, max_size=pp)),
            "flash_attention": draw(st.booleans()),
            "stage_layers": stage_layers,
        },
        "framework": "megatron-deepspeed-fugaku"
        if fugaku
        else draw(st.sampled_from(["megatron", "megatron-deepspeed"])),
    }
    on_node = load_machine(machine).devices_per_node
    assume(document["devices"] < on_node or document["devices"] % on_node == 0)
    return document


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(valid_documents())
def test_any_valid_scenario_is_read_and_read_back(document):
    scenario = scenario_from_document(document)
    assert scenario_from_document(json.loads(json.dumps(scenario.document(), allow_nan=False))) == scenario
    assert sum(scenario.layout.layers_by_stage(scenario.model.layers)) == scenario.model.layers
    assert len(scenario.layout.recompute_by_stage()) == scenario.layout.pp
    assert scenario.model.parameters(scenario.layout.tp, scenario.training.seq_len).total > 0
    scenario_warnings(scenario)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [10**30, -1, 0, 1e30, -0.0, float("nan"), float("inf"), "", " ", "8", "yes", "frontier", "\0", "é", "\ud800"]
    )
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=3)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from([*ScenarioFile.model_fields, "x", ""]), junk, max_size=10))
def test_a_document_of_junk_is_an_input_error_and_nothing_else(document):
    with pytest.raises(InputError) as error:
        scenario_from_document(document)
    assert error.value.problems
    assert str(error.value)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(
        [(part, key) for part in ("model", "training", "layout") for key in SMALL[part]]
        + [
            ("layout", "recompute"),
            ("layout", "stage_layers"),
            ("layout", "dp"),
            ("model", "kv_heads"),
            ("model", "head_dim"),
        ]
        + [
            ("training", "tokens"),
            ("training", "attention_dropout"),
            ("model", "vocab_multiple"),
            ("layout", "schedule"),
        ]
    ),
    junk,
)
def test_one_junk_value_is_taken_or_is_an_input_error(place, value):
    part, key = place
    document = copy.deepcopy(SMALL)
    document[part][key] = value
    try:
        scenario = scenario_from_document(document)
    except InputError as error:
        assert str(error)
    else:
        assert scenario_from_document(scenario.document()) == scenario


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.text(max_size=30)
        | st.builds(
            lambda key, value: f"{key}={value}",
            st.sampled_from(
                [
                    "layout.tp",
                    "layout",
                    "layout.tp.x",
                    "model",
                    "model.layers",
                    "training.tokens",
                    "devices",
                    "name",
                    "layout.stage_layers.0",
                ]
            ),
            st.text(max_size=12)
            | st.sampled_from(["&a [*a]", "!!python/object:os.system x", "2", "null", "[1,2]", "{a: 1}", "!!binary x"]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_override_is_taken_or_is_an_input_error(overrides):
    try:
        load_scenario("frontier-22b", overrides)
    except InputError as error:
        assert str(error)


def test_a_placement_is_part_of_the_scenario_and_comes_back(tmp_path):
    (tmp_path / "nodes.txt").write_text("5-8\n100\n300-303\n9000-9006\n", encoding="utf-8")
    overrides = ["placement.order=tp-pp-dp", f"placement.node_file={tmp_path / 'nodes.txt'}"]
    scenario = load_scenario("crusher-175b", [*overrides, "machine=frontier"])
    assert scenario.placement.nodes == (5, 6, 7, 8, 100, 300, 301, 302, 303, *range(9000, 9007))
    document = scenario.document()
    assert document["placement"] == {"order": "tp-pp-dp", "nodes": list(scenario.placement.nodes)}
    assert scenario_from_document(json.loads(json.dumps(document))).placement == scenario.placement
    assert "placement" not in load_scenario("crusher-175b").document()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("placement.order=tp-pp", "placement.order: unknown order 'tp-pp'; did you mean tp-"),
        ("placement.nodes=[1,2]", "placement.nodes: lists 2 nodes, but the ranks fill 384"),
        ("placement.node_file=none.txt", "placement.node_file: none.txt: no such file"),
        ("placement.node=3", "placement.node: unknown key"),
        ("placement.nodes=everywhere", "placement.nodes"),
        ("placement.shape=[8,8,6]", "placement.shape: is for a torus; the fabric of frontier is a dragonfly"),
    ],
)
def test_a_placement_that_cannot_be_is_an_error_of_the_scenario(override, said):
    with pytest.raises(InputError) as caught:
        load_scenario("frontier-1t", [override])
    assert said in str(caught.value)
