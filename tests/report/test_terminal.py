import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from exatwin.report.terminal import bar, open_console, screen_of


@pytest.mark.parametrize(("columns", "width"), [("10", 40), ("66", 66), ("80", 80), ("400", 100)])
def test_the_width_is_the_terminals_within_reason(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert open_console(io.StringIO()).width == width


def coloured(monkeypatch, **environment):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    open_console(stream).print(Text("fits", style="bold green"))
    return "\x1b[" in stream.getvalue()


def test_colour_follows_the_environment(monkeypatch):
    assert not coloured(monkeypatch)
    assert coloured(monkeypatch, FORCE_COLOR="1", TERM="xterm-256color")
    assert not coloured(monkeypatch, FORCE_COLOR="1", TERM="dumb")


def test_an_ascii_stream_gets_ascii_bars():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = open_console(stream)
    assert not screen_of(console).unicode
    console.print("naïve")
    assert bar(0.5, 8, unicode=False) == "####"


@given(st.floats(allow_nan=False), st.integers(1, 100))
def test_a_bar_stays_in_its_width(share, width):
    assert len(bar(share, width)) <= width
