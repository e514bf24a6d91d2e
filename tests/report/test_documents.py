import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.report.documents import check_destination, document_text, write_document
from exatwin.topology.errors import InputError


def test_a_document_is_written_whole(tmp_path):
    place = tmp_path / "answer.json"
    place.write_text("old")
    write_document({"step_s": 1.5, "name": "grün"}, str(place))
    assert json.loads(place.read_text(encoding="utf-8")) == {"step_s": 1.5, "name": "grün"}
    assert list(tmp_path.iterdir()) == [place]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    place = tmp_path / "answer.json"
    place.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_document({"step_s": float("nan")}, str(place))
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_a_link_is_followed_not_replaced(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_document({"a": 1}, str(link))
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}


def test_a_new_file_gets_the_permissions_of_any_other(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    write_document({}, str(tmp_path / "answer.json"))
    assert stat.S_IMODE((tmp_path / "answer.json").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_device_is_written_into():
    write_document({"a": 1}, os.devnull)
    assert not os.path.isfile(os.devnull)  # noqa: PTH113 (the device itself)


@pytest.mark.parametrize("path", ["missing/answer.json", ".", "", "a\0b", "x" * 300, "file/answer.json"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as caught:
        check_destination(path)
        write_document({}, path)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists))
def test_what_goes_in_comes_out(value):
    assert json.loads(document_text({"value": value})) == {"value": value}
