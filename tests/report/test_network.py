import json

import pytest

from exatwin.cli import run
from exatwin.report.network import network_markdown
from exatwin.twin.network_validation import NetworkRow, NetworkValidation


def row(**changes):
    fields = {
        "id": "a-row",
        "series": "a-series",
        "machine": "selene",
        "op": "all_reduce",
        "algorithm": "ring",
        "protocol": "simple",
        "size_bytes": 2.0**30,
        "measured": 1.0,
        "predicted": 1.04,
        "use": "unseen",
        "source": "a-source",
    }
    return NetworkRow(**fields | changes)


@pytest.fixture
def rows(monkeypatch):
    """A large and a small row that no fit has seen, and one that a fit has."""
    rows = [row(), row(id="small", size_bytes=8.0, predicted=1.2), row(id="fitted", use="fit", predicted=1.5)]
    monkeypatch.setattr("exatwin.twin.network_validation.validate_network", lambda: NetworkValidation(tuple(rows)))
    return rows


def test_benchmarks_within_their_bounds_end_with_0(rows, capsys):
    assert run(["validate", "--network"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "all all from 1 MiB on unseen 1 4.0 % +4.0 %" in out
    assert "keep to their bounds (10 % from 1 MiB on, 25 % below 1 MiB)" in out


def test_a_median_outside_its_bound_is_said_and_ends_with_4(rows, capsys):
    rows[0] = row(predicted=1.3)
    assert run(["validate", "--network"]) == 4
    assert "lie outside: 30.0 % from 1 MiB on" in " ".join(capsys.readouterr().out.split())
    assert run(["validate", "--network", "--json", "-q"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert not document["within"]
    assert [entry["ratio"] for entry in document["rows"]] == [1.3, 1.2, 1.5]


def test_unseen_rows_stand_before_fitted_ones(rows):
    page = network_markdown(NetworkValidation(tuple(rows)))
    assert page.index("| all | all | from 1 MiB on | unseen") < page.index("| all | all | from 1 MiB on | fit")
    assert page.index("| selene | all-reduce | below 1 MiB | unseen") < page.index(
        "| selene | all-reduce | from 1 MiB on | fit"
    )


def test_every_row_is_shown_where_asked(rows, capsys):
    assert run(["validate", "--network", "--rows"]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "a-row ring 1.0 GiB 1.00 s 1.04 s 1.04 unseen" in out
    assert run(["validate", "--network", "--rows", "--markdown"]) == 0
    assert "| a-row | ring | 1.0 GiB | 1.00 s | 1.04 s | 1.04 | unseen | `a-source` |" in capsys.readouterr().out
