"""The terminal, as wide and as colourful as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROWEST, WIDEST = 40, 100


@dataclass(frozen=True)
class Screen:
    """What a view must know of where it is shown: columns, and whether block characters can be."""

    width: int = 80
    unicode: bool = True

    @property
    def roomy(self) -> bool:
        """Whether bars and the lesser columns have a place."""
        return self.width >= 76


def open_console(stream: TextIO) -> Console:
    """A console on a stream.

    ``NO_COLOR``, ``FORCE_COLOR``, ``TERM=dumb`` and ``COLUMNS`` are honoured; a
    stream that is no terminal gets no colour and 80 columns.
    """
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # an ASCII stream loses a sign, not the answer
    size = shutil.get_terminal_size()
    width = max(NARROWEST, min(size.columns, WIDEST))
    return Console(file=stream, width=width, height=max(size.lines, 1), markup=False, highlight=False, emoji=False)


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print in one write, without the blanks that fill lines up."""
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    console.file.flush()


def screen_of(console: Console) -> Screen:
    """The screen behind a console."""
    return Screen(console.width, console.encoding.lower().startswith("utf"))


def plain_table(title: str, *columns: str, left: tuple[str, ...] = (), whole: bool = False) -> Table:
    """A table without lines: names on the left, figures on the right.

    Args:
        title: Heading of the names.
        columns: Headings of the figures.
        left: Those of them that hold text, which may wrap.
        whole: Whether names are kept on one line.
    """
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, overflow="fold", no_wrap=whole)
    for column in columns:
        if column in left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def indented(line: str, style: str = "") -> RenderableType:
    """A line two columns in, also where it wraps."""
    return Padding(Text(line, style=style), (0, 0, 0, 2), expand=False)


def group(parts: Iterable[RenderableType]) -> RenderableType:
    """Parts that stand together, without lines between."""
    return Group(*parts)


def spaced(sections: Iterable[RenderableType | None]) -> list[RenderableType]:
    """Sections with an empty line between; what is None is left out."""
    parts: list[RenderableType] = []
    for section in sections:
        if section is not None:
            parts += ["", section] if parts else [section]
    return parts


def bar(share: float, width: int, unicode: bool = True) -> str:
    """A share of one as a bar.

    >>> bar(0.5, 8)
    '████'
    >>> bar(0.3, 8)
    '██▍'
    >>> bar(0.001, 8)
    '▏'
    >>> bar(0.0, 8)
    ''
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    if not unicode:
        return "#" * round(eighths / 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
