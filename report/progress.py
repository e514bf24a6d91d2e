"""A bar on the terminal for what takes longer than a breath."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def progress_on(stream: TextIO, what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how much is done, of how much; it draws a bar where the stream is a terminal.

    >>> import io
    >>> with progress_on(io.StringIO(), "counting") as told:
    ...     told(1, 2)
    """
    if quiet or not stream.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
