"""What joins the devices of a machine, as the command shows and writes it."""

import json
import sys
from pathlib import Path

import pytest

from exatwin.cli import run
from exatwin.topology.graph import read_graph
from exatwin.topology.machine import load_machine, machine_names

OWN = Path(__file__).parents[1] / "topology" / "data" / "two-leaves.yaml"


def said(capsys, *arguments, code=0):
    assert run(["show", "topology", *map(str, arguments)]) == code
    return capsys.readouterr()


def test_a_dragonfly_is_told_by_its_counts(capsys):
    words = " ".join(said(capsys, "frontier").out.split())
    for part in (
        *("groups 77", "switches 2,464", "links between two groups 4", "out of a group 7.6 TB/s", "taper 1.68"),
        *("bisection 148.2 TB/s", "diameter, hops 3", "ports of a switch, all 57", "4 NICs of 25.0 GB/s", "hsn3"),
    ):
        assert part in words


@pytest.mark.parametrize("name", [*machine_names(), str(OWN)])
def test_every_fabric_has_a_bisection_a_taper_and_a_diameter(name, capsys):
    fabric = json.loads(said(capsys, name, "--json", "-q").out)["fabric"]
    assert {"kind", "bisection_bytes_per_s", "taper", "diameter_hops", "nics_per_node"} <= set(fabric)
    out = said(capsys, name).out
    assert all(part in out for part in ("bisection", "taper", "diameter"))
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 50


def test_all_machines_stand_in_one_list(capsys):
    out = said(capsys).out
    assert all(name in out for name in machine_names())
    assert "24x23x24x2x3x2" in out


def test_links_that_differ_are_named(capsys):
    assert "8-9, 10-11: 230 GB/s" in said(capsys, "aurora").out


@pytest.mark.parametrize("ending", ["graphml", "json", "edges"])
def test_a_graph_can_be_read_back(ending, tmp_path, capsys):
    place = tmp_path / f"own.{ending}"
    said(capsys, OWN, "-q", "-o", place)
    graph = read_graph(place)
    assert len(graph) == 8
    assert graph.edges["leaf:0", "spine:1"]["bandwidth_bytes_per_s"] == 20e9
    assert list(tmp_path.iterdir()) == [place]


def test_a_written_graph_is_a_fabric_of_ones_own(tmp_path, capsys):
    """The graph of a bundled machine, in a machine file of kind graph, has the same bisection."""
    said(capsys, OWN, "-q", "-o", tmp_path / "copy.edges")
    (tmp_path / "mine.yaml").write_text(OWN.read_text().replace("two-leaves.edges", "copy.edges"))
    before, after = (
        json.loads(said(capsys, name, "--json", "-q").out)["fabric"] for name in (OWN, tmp_path / "mine.yaml")
    )
    assert before == after


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_a_picture_is_drawn(ending, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    place = tmp_path / f"frontier.{ending}"
    said(capsys, "frontier", "-q", "-o", place)
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert place.read_bytes().startswith(starts[ending])
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frontier", "-o", "x.gif"], "x.gif: a picture ends in .svg, .png, .pdf and a graph in .graphml, .json"),
        (["frontier", "-o", "x"], "this name has no ending"),
        (["-o", "x.svg"], "x.svg: a picture or a graph is of one machine"),
        (["frontear", "-o", "x.svg"], "did you mean frontier?"),
        (["frontier", "-o", "missing/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_drawn_gets_one_clear_message(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out, err = said(capsys, *arguments, code=2)
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    place = tmp_path / "x.svg"
    err = said(capsys, "selene", "-o", place, code=2).err
    assert err == f"error: {place}: a picture needs matplotlib; install it with: pip install 'exatwin[plot]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_disconnected_graph_is_refused(tmp_path, capsys):
    (tmp_path / "two-leaves.edges").write_text("node:0 a\nnode:1 a\nnode:2 b\nnode:3 b\n")
    (tmp_path / "mine.yaml").write_text(OWN.read_text())
    assert "the graph is disconnected" in said(capsys, tmp_path / "mine.yaml", code=2).err
    assert load_machine(str(OWN)).node_count == 4
