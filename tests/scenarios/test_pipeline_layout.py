"""How a layout cuts the layers into virtual stages, and which schedules it can ask for."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import yaml

from exatwin.scenarios.layout import Layout
from exatwin.scenarios.model import Model
from exatwin.scenarios.rules import MOST_ACTIONS, Parts, batch_rules, model_rules
from exatwin.scenarios.scenario import load_scenario, scenario_from_document, scenario_warnings
from exatwin.scenarios.schedules import SCHEDULES, schedule_table, to_csv
from exatwin.scenarios.training import Training
from exatwin.topology.errors import InputError

SMALL = {
    "machine": "frontier",
    "devices": 64,
    "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50257},
    "training": {"seq_len": 1024, "global_batch": 64, "precision": "bf16"},
    "layout": {"tp": 4, "pp": 4, "micro_batch": 2},
}


def found(layers=48, sequences=256, **layout):
    """What the rules say of a layout on one replica, by field."""
    parts = Parts(
        model=Model(layers=layers, hidden=1024, heads=16, vocab=50257),
        training=Training(seq_len=1024, global_batch=sequences, precision="bf16"),
        layout=Layout(dp=1, **layout),
        machine=None,
        framework=None,
        devices=None,
        nodes=None,
    )
    said = [*model_rules(parts), *batch_rules(parts)]
    return [str(problem) for problem in said if "not simulated yet" not in problem.message]


def test_layers_are_shared_by_all_virtual_stages():
    layout = Layout(pp=4, vpp=3)
    assert layout.virtual_stages == 12
    assert layout.layers_by_virtual_stage(24) == (2,) * 12
    assert layout.layers_by_stage(24) == (6,) * 4
    with pytest.raises(InputError, match="pp x vpp = 4 x 3 = 12 does not divide 42 layers; pp can be 1, 2, 7, 14"):
        layout.layers_by_virtual_stage(42)


def test_a_rank_has_the_layers_of_its_stages_wherever_its_schedule_puts_them():
    given = (1, 2, 3, 4, 5, 6, 7, 9)
    assert Layout(pp=4, vpp=2, stage_layers=given).layers_by_stage(37) == (6, 8, 10, 13)
    assert Layout(pp=4, vpp=2, stage_layers=given, schedule="zb-v").layers_by_stage(37) == (10, 9, 9, 9)


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "vpp": 3},
        {"pp": 4, "vpp": 2, "schedule": "interleaved"},
        {"pp": 4, "vpp": 2, "schedule": "gpipe"},
        {"pp": 4, "schedule": "zb-h1"},
        {"pp": 4, "vpp": 2, "schedule": "zb-v"},
        {"pp": 4, "vpp": 2, "schedule": "dualpipe-v"},
        {"pp": 4, "vpp": 2, "stage_layers": (5, 6, 6, 6, 6, 6, 6, 7)},
    ],
)
def test_a_layout_that_a_schedule_runs_is_taken(layout):
    assert found(**layout) == []


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pp": 4, "vpp": 5}, "layout.pp: pp x vpp = 4 x 5 = 20 does not divide the 48 layers"),
        ({"pp": 4, "vpp": 5}, "pp can be no number with vpp=5 (vpp can be 1, 2, 3, 4, 6, 8), or give stage_layers"),
        ({"pp": 32, "vpp": 2}, "pp x vpp = 32 x 2 = 64 has more stages than the 48 layers"),
        ({"pp": 5, "vpp": 2}, "pp can be 1, 2, 3, 4, 6, 8, 12, 24"),
        (
            {"pp": 2, "vpp": 2, "stage_layers": (24, 24)},
            "has 2 entries for pp x vpp = 2 x 2 = 4 stages; give 4 entries or set pp=1",
        ),
        ({"pp": 2, "vpp": 2, "stage_layers": (16, 16, 16)}, "give 4 entries"),
        ({"pp": 2, "vpp": 2, "stage_layers": (12, 12, 12, 11)}, "adds up to 47 layers"),
        ({"pp": 4, "schedule": "interleaved"}, "layout.vpp: vpp=1 leaves nothing to interleave"),
        ({"pp": 4, "vpp": 2, "schedule": "zb-h1"}, "layout.vpp: vpp=2 is no number of virtual stages a rank"),
        ({"pp": 4, "vpp": 3, "schedule": "zb-v"}, "for schedule zb-v; it can be 2"),
        (
            {"pp": 4, "vpp": 2, "schedule": "dualpipe-v", "sequences": 7},
            "training.global_batch: gives each replica 7 micro-batches, and schedule dualpipe-v needs 8 on 4 ranks",
        ),
        ({"pp": 24, "vpp": 2, "sequences": 1_000_000}, f"has 96000000 passes; at most {MOST_ACTIONS}"),
    ],
)
def test_a_layout_that_no_schedule_runs_is_refused_with_what_would_run(layout, said):
    assert any(said in text for text in found(**layout)), found(**layout)


@pytest.fixture
def folder(tmp_path):
    """A folder with a scenario and the schedule that it names."""
    document = copy.deepcopy(SMALL)
    document["layout"]["schedule"] = "mine.csv"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "mine.csv").write_text(to_csv(schedule_table(SCHEDULES["gpipe"], 4, 8)))
    return tmp_path


def test_a_schedule_file_lies_beside_its_scenario(folder):
    scenario = load_scenario(str(folder / "mine.yaml"))
    assert scenario.schedule.shape == (4, 8)
    assert scenario.schedule is scenario.schedule
    assert scenario_from_document(scenario.document()).schedule.shape == (4, 8)


def test_a_schedule_has_its_name_where_it_is_bundled():
    document = copy.deepcopy(SMALL)
    assert scenario_from_document(document).schedule is SCHEDULES["1f1b"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("layout.pp=2", "layout.pp: pp=2 is not the 4 ranks of schedule"),
        ("training.global_batch=32", "training.global_batch: gives each replica 4 micro-batches, and schedule"),
    ],
)
def test_a_schedule_file_is_for_its_own_ranks_and_micro_batches(folder, override, said):
    with pytest.raises(InputError) as error:
        load_scenario(str(folder / "mine.yaml"), [override])
    assert any(said in str(problem) for problem in error.value.problems)


def test_a_schedule_file_that_cannot_be_played_is_an_error_of_its_field(folder):
    (folder / "mine.csv").write_text("0F0,0F0\n")
    with pytest.raises(InputError, match=r"layout.schedule: .*mine.csv: rank 0: 0F0 stands twice"):
        load_scenario(str(folder / "mine.yaml"))


def test_an_interleaved_step_that_megatron_does_not_run_has_a_warning():
    plain = scenario_from_document(SMALL)  # 8 micro-batches a replica
    for pp, warned in ((4, False), (3, True)):
        layout = plain.layout.model_copy(update={"vpp": 2, "pp": pp})
        assert any("Megatron-LM" in text for text in scenario_warnings(replace(plain, layout=layout))) == warned
