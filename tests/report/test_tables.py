"""What people read of a prediction."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from exatwin.report.published import published_run
from exatwin.report.tables import MOST_STAGES, prediction_document, prediction_view, shown_stages
from exatwin.report.terminal import Screen, print_parts
from exatwin.scenarios.result import Memory, MemoryParts, StageMemory
from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.predict import predict


def shown(name, *overrides, width=80, network="shared", change=lambda prediction: prediction):
    scenario = load_scenario(name, overrides)
    prediction = change(predict(scenario, fidelity="recurrence", network=network))
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    view = prediction_view(prediction, scenario, published_run(scenario, prediction), Screen(width))
    print_parts(console, [view])
    return console.file.getvalue(), prediction


@pytest.mark.parametrize("width", [40, 60, 76, 80, 100])
@pytest.mark.parametrize("name", ["frontier-1t", "lumi-175b", "fugaku-30b"])
def test_no_figure_is_cut_off(name, width):
    text, prediction = shown(name, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for words in (f"{prediction.memory.worst.peak_bytes / 2**30:,.1f}", f"{prediction.hfu * 100:.1f} %"):
        assert words in text


def test_the_answer_is_one_screen():
    text, _ = shown("frontier-1t")
    assert len(text.splitlines()) <= 66


def test_a_gcd_is_said_to_be_one():
    text, _ = shown("frontier-1t")
    assert "3,072 GCDs = 384 nodes = 1,536 MI250X modules" in text
    assert "hardware TFLOP/s a GCD" in text
    assert "HFU, recomputation counted" in text


def test_both_conventions_stand_beside_what_was_published():
    """61.2 counts recomputation; without it that is about three quarters."""
    text, _ = shown("frontier-1t")
    row = re.search(r"hardware TFLOP/s a GCD +[\d.]+ +61\.2 +([+-][\d.]+) %", text)
    assert row
    assert re.search(r"model TFLOP/s a GCD +[\d.]+ +45\.9 \*", text)
    assert "* converted" in text


def test_published_memory_stands_beside_its_stage():
    text, _ = shown("lumi-175b")
    assert re.search(r"^0 worst +[\d.]+ +47\.7 ", text, re.MULTILINE)


def test_another_question_than_the_published_one_is_named():
    text, _ = shown("frontier-1t", "layout.tp=4", "layout.pp=128")
    assert "NOT the same question: the published run has layout.tp 8, layout.pp 64" in text
    assert "NOT the same question" not in shown("frontier-1t")[0]


@pytest.mark.parametrize(
    ("overrides", "network", "words"),
    [
        (["layout.tp=4", "layout.pp=128"], "shared", "layout.tp 8"),
        (["perturb.nics=[{node: 6, nic: hsn0, rate: 0.5}]"], "shared", "none of these perturbations"),
        (["placement.nodes=spread"], "shared", "no such placement"),
        ([], "solo", "transfers that share their links"),
    ],
)
def test_a_difference_between_two_questions_is_not_shown_as_an_error(overrides, network, words):
    text, _ = shown("frontier-1t", *overrides, network=network)
    assert f"NOT the same question: the published run has {words}" in text
    assert "854.20 s" in text
    assert "difference" not in text


def test_groups_that_leave_a_node_are_named():
    text, _ = shown("frontier-1t", width=100)
    assert "data-parallel groups span 6 nodes and 1 to 2 dragonfly groups; pipelines span 64 nodes" in text
    assert "tensor-parallel groups span" not in text
    text, _ = shown("frontier-1t", "placement.order=pp-tp-dp", "placement.nodes=spread", width=100)
    assert "rank order pp-tp-dp, nodes spread; tensor-parallel groups span" in text


def test_the_busiest_links_stand_with_their_users():
    text, prediction = shown("frontier-1t")
    first = prediction.links[0]
    row = rf"^{first.name} +{first.count:,} +[\d.]+ GiB +{first.busy * 100:.2f} % +tp$"
    assert re.search(row, text, re.MULTILINE)
    assert re.search(r"^node \d+ hsn\d out .* pp, dp$", text, re.MULTILINE)
    assert re.search(r"^group \d+ -> group \d+ .* pp, dp$", text, re.MULTILINE)
    assert "busiest links" not in shown("frontier-22b", "devices=1", "layout={tp: 1, pp: 1}", "model=gpt-7b-lumi")[0]


PERTURBATIONS = {
    "perturb.devices=[{rank: 7, speed: 0.8}]": "rank 7 at 80 % of its speed",
    "perturb.devices=[{node: 7, speed: 0.8}]": "node 7 at 80 % of its speed",
    "perturb.nics=[{node: 6, nic: hsn0, rate: 0.5}]": "NIC hsn0 of node 6 at 50 %",
    "perturb.nics=[{node: 6, nic: hsn0, rate: 0}]": "NIC hsn0 of node 6 failed",
    "perturb.links=[{groups: [0, 1], rate: 0.1}]": "links between groups 0 and 1 at 10 %",
    "perturb.links=[{node: 2, between: [0, 1], rate: 0.1}]": "link between GCDs 0 and 1 of node 2 at 10 %",
    "perturb.background=[{source: 0, target: 9, rate: 5 GB/s}]": "5.0 GB/s of another job, node 0 to 9",
    "perturb.jitter={spread: 0.05, seed: 3}": "jitter of 0.05 of each action's time, seed 3",
}


@pytest.mark.parametrize("override", PERTURBATIONS)
def test_a_perturbation_is_named_with_the_kinds_of_replicas_it_makes(override):
    text, prediction = shown("frontier-1t", override, width=100)
    kinds = prediction.engine.lanes
    assert kinds > 1 or "node 2" in PERTURBATIONS[override]
    one_line = " ".join(text.split())
    words = f"perturbed, {kinds} kind{'s' * (kinds > 1)} of replicas: {PERTURBATIONS[override]}"
    assert words in one_line
    assert "perturbed" not in shown("frontier-1t")[0]


def test_many_perturbations_are_counted():
    listed = ", ".join(f"{{rank: {rank}, speed: 0.9}}" for rank in range(0, 700, 100))
    text, _ = shown("frontier-1t", f"perturb.devices=[{listed}]", width=100)
    assert "rank 300 at 90 % of its speed and 3 more" in " ".join(text.split())


def test_the_document_carries_what_the_table_says():
    scenario = load_scenario("frontier-1t", ["perturb.nics=[{node: 6, nic: hsn0, rate: 0.5}]"])
    document = prediction_document(predict(scenario, fidelity="recurrence", network="solo"), scenario)
    assert document["network"] == "solo"
    assert document["perturbed"] == ["NIC hsn0 of node 6 at 50 %"]
    assert document["placement"][0].startswith("data-parallel groups span 6 nodes")
    assert document["links"][0]["users"]
    assert document["scenario"]["perturb"]["nics"] == [{"node": 6, "nic": "hsn0", "rate": 0.5}]
    assert document["engine"]["lanes"] == 2


def test_no_published_run_no_column():
    text, _ = shown("frontier-1t", "measured=null")
    assert "published" not in text


@pytest.mark.parametrize("verdict", ["fits", "marginal", "does not fit"])
def test_every_verdict_is_said(verdict):
    def judge(prediction):
        return dataclasses.replace(prediction, memory=dataclasses.replace(prediction.memory, verdict=verdict))

    assert f"memory: {verdict};" in shown("frontier-22b", change=judge)[0]


def test_warnings_come_last():
    text, _ = shown("frontier-22b", change=lambda prediction: dataclasses.replace(prediction, warnings=("mind this",)))
    assert text.splitlines()[-1] == "warning: mind this"


def memory_of(peaks):
    stages = [
        StageMemory(number, peak, peak, peak, 0.0, "", MemoryParts(parameters=peak), 0.0)
        for number, peak in enumerate(peaks)
    ]
    return Memory("fits", 64 * 2**30, 0.0, 0.0, tuple(stages))


@pytest.mark.parametrize("stages", [1, 2, 7, 8, 9, 64, 1000])
@pytest.mark.parametrize("worst", [0, 0.5, 1])
def test_first_worst_and_last_stage_are_always_shown(stages, worst):
    peaks = [1.0] * stages
    peaks[round(worst * (stages - 1))] = 2.0
    memory = memory_of(peaks)
    numbers = [stage.stage for stage in shown_stages(memory)]
    assert numbers == sorted(set(numbers))
    assert {0, memory.worst.stage, stages - 1} <= set(numbers)
    assert len(numbers) <= MOST_STAGES + 1
