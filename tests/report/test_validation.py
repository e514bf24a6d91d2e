from typing import get_args

import pytest

from exatwin.cli import run
from exatwin.report.validation import TITLES, USES, validation_markdown
from exatwin.scenarios.measurements import Use
from exatwin.twin.validate import Quantity, Validation, ValidationRow


def row(**changes):
    fields = {
        "id": "a-run",
        "quantity": "step",
        "machine": "frontier",
        "source": "a-source",
        "use": "unseen",
        "measured": 100.0,
        "predicted": 103.0,
        "error": 0.03,
        "bound": 0.05,
        "note": "",
    }
    return ValidationRow(**fields | changes)


@pytest.fixture
def outcome(monkeypatch):
    """Three rows, the last outside its bound."""
    rows = (row(), row(id="fitted", use="fit"), row(id="missed", predicted=120.0, error=0.2))
    made = Validation(rows)
    monkeypatch.setattr("exatwin.twin.validate.validate", lambda: made)
    return made


def test_a_row_outside_its_bound_is_said_and_ends_with_4(outcome, capsys):
    assert run(["validate"]) == 4
    out = capsys.readouterr().out
    assert "1 of 3 rows lie outside their bound" in out
    assert "+20.0 %" in out
    assert run(["validate", "--json", "-q"]) == 4


def test_rows_within_end_with_0(outcome, monkeypatch, capsys):
    monkeypatch.setattr("exatwin.twin.validate.validate", lambda: Validation(outcome.rows[:2]))
    assert run(["validate"]) == 0
    assert "all 2 rows keep to their bounds" in capsys.readouterr().out


def test_seen_and_unseen_rows_stand_apart(outcome):
    page = validation_markdown(outcome)
    unseen, fitted = page.index("## Step time: unseen"), page.index("## Step time: fit")
    assert unseen < page.index("| a-run |") < page.index("**+20.0 %**") < fitted < page.index("| fitted |")


def test_every_quantity_and_use_has_its_words():
    assert set(get_args(Quantity)) == set(TITLES)
    assert set(get_args(Use)) == set(USES)
