"""What people read of a prediction."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from exatwin.report.published import published_run
from exatwin.report.tables import MOST_STAGES, prediction_view, shown_stages
from exatwin.report.terminal import Screen, print_parts
from exatwin.scenarios.result import Memory, MemoryParts, StageMemory
from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.predict import predict


def shown(name, *overrides, width=80, change=lambda prediction: prediction):
    scenario = load_scenario(name, overrides)
    prediction = change(predict(scenario, fidelity="recurrence"))
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
    assert len(text.splitlines()) <= 60


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
    assert "not the same question: the published run has layout.tp 8, layout.pp 64" in text
    assert "not the same question" not in shown("frontier-1t")[0]


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
        StageMemory(number, peak, peak, 0.0, "", MemoryParts(parameters=peak), 0.0) for number, peak in enumerate(peaks)
    ]
    return Memory("fits", 64 * 2**30, 0.0, tuple(stages))


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
