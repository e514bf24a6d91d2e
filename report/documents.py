"""JSON documents on stdout and in files.

A file appears whole or not at all: it is written beside its place and then
moved there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..topology.errors import InputError, input_error


def document_text(document: dict[str, Any]) -> str:
    """A document as JSON text; a number that JSON cannot hold is an error, never ``NaN``.

    >>> print(document_text({"step_s": 854.5}), end="")
    {
      "step_s": 854.5
    }
    """
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def check_destination(path: str | None) -> None:
    """Refuse a place that cannot be written, before the work is done.

    Raises:
        InputError: If it is a directory, or its folder is missing or read-only.
    """
    if path is None or path == "-":
        return
    place = _resolved(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            place.stat()
    except OSError as error:
        raise _unwritable(path, error) from None
    if place.is_dir():
        raise input_error("is a directory, a file to write is needed", where=path)
    if not place.parent.is_dir():
        raise input_error(f"cannot be written: there is no folder {place.parent}", where=path)
    if not os.access(place if _is_special(place) else place.parent, os.W_OK):
        raise input_error("cannot be written: permission denied", where=path)


def write_document(document: dict[str, Any], path: str) -> None:
    """Write a document to a file, whole or not at all, or to stdout where the path is ``-``.

    Raises:
        InputError: If the file cannot be written.
    """
    write_text(document_text(document), path)


def write_text(text: str, path: str) -> None:
    """Write text to a file, whole or not at all, or to stdout where the path is ``-``.

    Raises:
        InputError: If the file cannot be written.
    """
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    check_destination(path)
    place = _resolved(path)
    try:
        if _is_special(place):
            place.write_text(text, encoding="utf-8")
        else:
            _replace(place, text)
    except OSError as error:
        raise _unwritable(path, error) from None


@contextlib.contextmanager
def drafted(path: str) -> Iterator[Path]:
    """A place beside a file, of the same ending, for a writer that writes files itself; moved there when it is done.

    Raises:
        InputError: If it cannot be moved there.
    """
    place = _resolved(path)
    draft = place.with_name(f".{place.stem[:200]}.{os.getpid()}.part{place.suffix}")
    try:
        yield draft
        draft.replace(place)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _replace(place: Path, text: str) -> None:
    draft = place.with_name(f".{place.name[:200]}.{os.getpid()}.part")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _resolved(path: str) -> Path:
    """Where the path leads: a link is followed, so that its target is replaced and not the link."""
    if not path or "\0" in path:
        raise input_error(f"{path!r} is not a file name")
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise input_error(f"cannot be written: {error}", where=path) from None


def _is_special(place: Path) -> bool:
    """Whether it is a pipe or a device, which is written into rather than replaced."""
    try:
        return not stat.S_ISREG(place.stat().st_mode)
    except OSError:
        return False


def _unwritable(path: str, error: OSError) -> InputError:
    reason = {errno.ENAMETOOLONG: "the name is too long"}.get(error.errno or 0, error.strerror or str(error))
    return input_error(f"cannot be written: {reason}", where=path)
