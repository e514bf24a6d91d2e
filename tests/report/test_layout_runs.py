"""The table of docs/trained-layouts.md: its rows are layouts the trainer runs, and it says what came of each."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from exatwin.report.layout_runs import COLUMNS, PAGE, layout_runs_markdown, main
from exatwin.scenarios.result import Breakdown, Spread
from exatwin.topology.errors import RunError, input_error
from exatwin.trainer.refusals import check_runs
from exatwin.twin.layout_runs import LAYOUT_RUNS, WITHIN, LayoutRun, differences, run_layouts

ALONE, TWO = LayoutRun("gpt-10m", "", 1, 4), LayoutRun("gpt-10m", "pp=2 schedule=zb-h1", 2, 1)


def measured(losses=(5.0, 4.0, 3.0), norm=2.0, peaks=(50, 70)):
    """As much of a measurement as a row shows."""
    return SimpleNamespace(
        steps=[SimpleNamespace(loss=loss, gradient_norm=norm) for loss in losses],
        breakdown_s=Breakdown(compute=1.0, recompute=0.2, tp_comm=0.1, pp_comm=0.1, bubble=0.4, optimizer=0.2),
        spread_s=Spread(2.0, 1.9, 2.1, 0.031),
        step_s=2.0,
        tokens_per_s=512.4,
        ranks=[SimpleNamespace(peak_bytes=peak * 2.0**20) for peak in peaks],
    )


def answered(monkeypatch, *answers):
    """Runs that give these measurements, or raise."""
    answers = iter(answers)

    def train(scenario, options):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(measurement=answer, stopped=answer is None)

    monkeypatch.setattr("exatwin.twin.layout_runs.train", train)


def rows(text):
    """The cells of each row of the table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)) for line in lines[1:]]


# --- the rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", LAYOUT_RUNS, ids=lambda run: f"{run.model} {run.layout} dp={run.dp}")
def test_a_row_is_a_layout_that_the_trainer_runs(run):
    scenario = run.scenario
    check_runs(scenario)
    assert scenario.devices <= 8
    assert run.steps >= 3  # the third loss is compared
    assert (scenario.dp, scenario.layout.micro_batch) == (run.dp, run.micro_batch)


def test_every_way_of_cutting_is_among_the_rows():
    cut = {
        (run.scenario.layout.tp, run.scenario.layout.pp, run.dp) for run in LAYOUT_RUNS if run.scenario.layout.cp == 1
    }
    degrees = (1, 2, 4)
    assert cut >= {(t, p, d) for t in degrees for p in degrees for d in degrees if t * p * d <= 8}
    text = " ".join(run.layout for run in LAYOUT_RUNS)
    for word in (
        "zero=1",
        "zero=2",
        "zero=3",
        "interleaved",
        "zb-h1",
        "zb-v",
        "cp=2",
        "ep=2",
        "sequence_parallel=true",
    ):
        assert word in text
    assert len(set(LAYOUT_RUNS)) == len(LAYOUT_RUNS)


def test_the_first_row_of_a_model_is_one_process():
    for run in {run.model: run for run in reversed(LAYOUT_RUNS)}.values():
        assert (run.layout, run.dp) == ("", 1)


# --- what comes of them -----------------------------------------------------------------------------------------------


def test_a_row_is_right_where_it_trains_as_one_process(monkeypatch):
    near, far = 1 + WITHIN / 2, 1 + 2 * WITHIN
    answered(monkeypatch, measured(), measured((5.0, 4.0, 3.0 * near)), measured(norm=2.0 * far))
    alone, right, wrong = run_layouts((ALONE, TWO, TWO))
    assert alone.alone
    assert (right.right, wrong.right) == (True, False)
    assert right.differences == pytest.approx((0.0, WITHIN / 2, 0.0))
    assert wrong.differences == pytest.approx((0.0, 0.0, 2 * WITHIN))


def test_only_the_first_loss_and_the_third_are_compared():
    assert differences(measured(), measured((5.0, 9.0, 3.0, 9.0))) == (0.0, 0.0, 0.0)
    assert differences(measured(norm=None), measured())[2] == float("inf")


def test_a_row_that_fails_is_a_row_with_its_reason(monkeypatch):
    """The rows after it run, and are held against the same process."""
    reason = "rank 1 (pp 1, dp 0, cp 0, tp 0)\nfailed: a | b <c>"
    answered(monkeypatch, measured(), RunError(reason), input_error("no", field="layout.tp"), measured())
    told, notes = [], []
    outcomes = run_layouts((ALONE, TWO, TWO, TWO), lambda *done: told.append(done), notes.append)
    assert [outcome.reason for outcome in outcomes] == ["", " ".join(reason.split()), "layout.tp: no", ""]
    assert outcomes[3].right
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert notes[1].startswith("gpt-10m pp=2 schedule=zb-h1 dp=2: failed: rank 1")
    text = layout_runs_markdown(outcomes, "here")
    assert "1 of the 1 that are held against one process are right" in text
    assert "2 failed." in text
    assert "- gpt-10m, pp 2, zb-h1, dp 2: rank 1 (pp 1, dp 0, cp 0, tp 0) failed: a \\| b &lt;c>" in text
    assert [row["right"] for row in rows(text)] == ["reference", "failed", "failed", "yes"]


def test_without_its_process_a_row_cannot_be_right(monkeypatch):
    answered(monkeypatch, RunError("killed"), measured())
    text = layout_runs_markdown(run_layouts((ALONE, TWO)), "here")
    assert [row["right"] for row in rows(text)] == ["failed", "no reference"]


def test_ctrl_c_is_for_all_rows(monkeypatch):
    answered(monkeypatch, measured(), None, measured())
    with pytest.raises(KeyboardInterrupt):
        run_layouts((ALONE, TWO, TWO))


def test_a_row_shows_what_its_run_took(monkeypatch):
    answered(monkeypatch, measured(), measured((5.0, 4.0, 3.3)))
    first, second = rows(layout_runs_markdown(run_layouts((ALONE, TWO)), "here"))
    assert first["first loss"] == "5.0000"
    assert second == {
        "model": "gpt-10m",
        "layout": "pp 2, zb-h1, dp 2",
        "ranks": "4",
        "micro-batches": "4",
        "right": "NO",
        "first loss": "0",
        "third loss": "1.0e-01",
        "norm": "0",
        "step": "2.00 s",
        "cv": "3 %",
        "tokens/s": "512",
        "compute": "60 %",
        "comm.": "10 %",
        "bubble": "20 %",
        "peak MiB": "70",
    }


def test_real_runs_of_a_tiny_model_are_right(tmp_path):
    """Forked ranks, the bundled text, and the whole way to the table."""
    pytest.importorskip("torch")
    model = tmp_path / "tiny.yaml"
    model.write_text("{name: tiny, layers: 2, hidden: 16, heads: 2, vocab: 256, vocab_multiple: 8, source: assumed}")
    runs = tuple(
        replace(run, model=str(model), steps=3)
        for run in (ALONE, LayoutRun("", "tp=2", 1, 4), LayoutRun("", "zero=3", 2, 2))
    )
    outcomes = run_layouts(runs)
    assert [outcome.reason for outcome in outcomes] == ["", "", ""]
    assert [outcome.ranks for outcome in outcomes] == [1, 2, 2]
    assert outcomes[1].right
    assert outcomes[2].right
    assert "2 of the 2" in layout_runs_markdown(outcomes, "here")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_row_and_none_is_wrong():
    """`make train-table` writes it anew."""
    page = PAGE.read_text(encoding="utf-8")
    written = rows(page)
    asked = [(run.model, str(run.scenario.devices)) for run in LAYOUT_RUNS]
    assert [(row["model"], row["ranks"]) for row in written] == asked
    assert {row["right"] for row in written} == {"reference", "yes"}


def test_the_command_writes_the_page_and_says_which_rows_there_were(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- written by make train-table -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr("exatwin.report.layout_runs.PAGE", page)
    answered(monkeypatch, *(measured() for _ in LAYOUT_RUNS))
    main()
    text = page.read_text()
    assert text.startswith("before\n<!-- written by make train-table -->\nMeasured on ")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert len(rows(text)) == len(LAYOUT_RUNS)
    assert capsys.readouterr().err.count(": 2.00 s") == len(LAYOUT_RUNS)
