from __future__ import annotations

import csv
import json
from typing import get_args

import pytest

from exatwin.cli import run
from exatwin.report.accuracy import with_series, with_tables
from exatwin.report.validation import KINDS, USES, validation_markdown
from exatwin.scenarios.measurements import Use
from exatwin.twin.bounds import Breach
from exatwin.twin.validate import Validation
from exatwin.twin.validation_rows import Kind, Unanswered, ValidationRow


def row(**changes):
    fields = {
        "id": "a-run",
        "quantity": "step",
        "series": "a-series",
        "source": "a-source",
        "machine": "frontier",
        "device": "MI250X GCD",
        "devices": 8,
        "use": "unseen",
        "measured": 100.0,
        "predicted": 103.0,
        "error": 0.03,
        "bound": 0.05,
        "parts": {"compute": 90.0, "bubble": 13.0},
    }
    return ValidationRow(**fields | changes)


ROWS = (
    row(),
    row(id="fitted", use="fit"),
    row(id="full", quantity="memory", measured=2**30, predicted=2**30),
    row(id="verdict", quantity="verdict", measured=0.0, predicted=1.0, error=1.0, bound=None),
    row(id="missed", predicted=120.0, error=0.2),
)


@pytest.fixture
def outcome(monkeypatch):
    """Rows of which the last lies outside its bound."""
    made = Validation(ROWS)
    monkeypatch.setattr("exatwin.twin.validate.validate", lambda *_, **__: made)
    return made


@pytest.fixture
def good(monkeypatch):
    made = Validation(ROWS[:3])
    monkeypatch.setattr("exatwin.twin.validate.validate", lambda *_, **__: made)
    return made


def test_a_row_outside_its_bound_is_said_and_ends_with_4(outcome, capsys):
    assert run(["validate"]) == 4
    out = capsys.readouterr().out
    assert "1 of 5 rows lie outside their bound: missed" in out
    assert "+20.0 %" in out
    assert run(["validate", "--json", "-q"]) == 4


def test_rows_within_end_with_0(good, capsys):
    assert run(["validate"]) == 0
    assert "all 3 rows keep to what is stated" in capsys.readouterr().out


def test_a_series_whose_errors_grew_ends_with_4(monkeypatch, capsys):
    made = Validation(ROWS[:3], breaches=(Breach("a-series", "time", "median", 0.08, 0.06),))
    monkeypatch.setattr("exatwin.twin.validate.validate", lambda *_, **__: made)
    assert run(["validate"]) == 4
    assert "a-series: median of step time or rate is 8.0 %, stated 6.0 %" in capsys.readouterr().out


def test_runs_that_cannot_be_asked_are_counted(monkeypatch, capsys):
    made = Validation(ROWS[:3], (Unanswered("b-run", "b-series", "layout.vpp: is not simulated yet"),))
    monkeypatch.setattr("exatwin.twin.validate.validate", lambda *_, **__: made)
    assert run(["validate"]) == 0
    assert "not simulated: 1 runs (b-series 1); b-run: layout.vpp" in capsys.readouterr().out


def test_seen_and_unseen_rows_stand_apart(outcome):
    page = validation_markdown(outcome, rows=True)
    assert "| all | step time or rate | unseen | 2 |" in page
    assert "| all | step time or rate | fit | 1 |" in page
    assert "| verdict | a-series | unseen | out of memory | fits | wrong |  |" in page


def test_every_row_is_shown_when_asked(outcome, capsys):
    run(["validate"])
    assert "a-source" not in capsys.readouterr().out
    run(["validate", "--rows"])
    assert "full" in capsys.readouterr().out


def test_json_holds_what_is_shown(outcome, capsys):
    run(["validate", "--json", "-q"])
    document = json.loads(capsys.readouterr().out)
    assert document["within"] is False
    assert [one["id"] for one in document["rows"]] == [one.id for one in ROWS]
    assert document["suspects"][0]["id"] == "missed"


def test_rows_go_to_a_csv_file(good, tmp_path):
    assert run(["validate", "-q", "-o", str(tmp_path / "rows.csv")]) == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["id"], float(rows[0]["error"])) == ("a-run", 0.03)


def test_a_page_draws_every_row_with_its_name_and_needs_nothing_else(good, tmp_path):
    assert run(["validate", "-q", "-o", str(tmp_path / "rows.html")]) == 0
    page = (tmp_path / "rows.html").read_text()
    assert page.count("<title>") == 1 + 3
    assert "a-run: measured 100.00 s" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_picture_without_matplotlib_says_what_to_do(good, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert run(["validate", "-q", "-o", str(tmp_path / "rows.png")]) == 2
    assert "exatwin[plot]" in capsys.readouterr().err


def test_a_picture_is_drawn_with_matplotlib(good, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(["validate", "-q", "-o", str(tmp_path / "rows.png")]) == 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("asked", [["-o", "rows.pdf"], ["-o", "rows.svg"], ["--network", "-o", "rows.png"]])
def test_a_format_that_is_not_made_is_refused_before_anything_is_predicted(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["validate", "-q", *asked]) == 2
    assert ".json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bounds_are_written_in_the_form_of_their_file(good, tmp_path):
    place = tmp_path / "bounds.yaml"
    assert run(["validate", "-q", "--state-bounds", str(place)]) == 0
    assert "a-series" in place.read_text()
    old = "# head\nseries: {}\n# The error that each single row\neach: {}\n"
    assert with_series(old, place.read_text()).endswith("# The error that each single row\neach: {}\n")


def test_the_tables_of_a_page_are_replaced_and_nothing_else():
    page = "before\n<!-- written by make accuracy -->\nold\n<!-- end -->\nafter\n"
    assert with_tables(page, "new\n") == page.replace("old", "new")


def test_every_kind_and_use_has_its_words():
    assert set(get_args(Kind)) == set(KINDS)
    assert set(get_args(Use)) == set(USES)
