"""Pictures: drawn where matplotlib is there, and a clear word where it is not."""

from __future__ import annotations

import sys

import pytest

from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine, machine_names
from exatwin.topology.picture import picture

from .small import fact, fat_tree, small, torus


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "machine.svg"
    picture(load_machine(name), file)
    assert file.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_fabrics_of_few_parts_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "net.edges").write_text("node:0 a\nnode:1 a\n", encoding="utf-8")
    fabric = {"kind": "graph", "file": str(tmp_path / "net.edges"), "link_bandwidth": fact("1 GB/s")}
    for number, machine in enumerate(
        (torus((3,), (True,)), torus((2, 2), (False,) * 2), fat_tree(2, 4, 1), small(fabric, 2))
    ):
        file = tmp_path / f"{number}.png"
        picture(machine, file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(InputError, match=r"needs matplotlib; install it with: pip install 'exatwin\[plot\]'"):
        picture(load_machine("selene"), tmp_path / "x.svg")


def test_a_picture_of_another_kind_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a picture ends in \.svg, \.png, \.pdf, not '\.bmp'"):
        picture(load_machine("selene"), tmp_path / "x.bmp")


def test_a_folder_that_is_not_there_is_said(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="cannot be written"):
        picture(load_machine("selene"), tmp_path / "none" / "x.svg")
