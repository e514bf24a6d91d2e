"""Bundled files of this room, and the user's own beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..topology.errors import InputError, Problem, input_error
from ..topology.files import bundled_names, looks_like_path, read_document

PACKAGE = "exatwin.scenarios"
MOST_VALUES = 100_000
MOST_DEPTH = 50


def bundled(folder: str) -> list[str]:
    """Names of the files in a bundled folder."""
    return bundled_names(PACKAGE, folder)


def read(name: str, folder: str, kind: str) -> tuple[dict[str, Any], str]:
    """A document by bundled name or path, and the name for its errors.

    Raises:
        InputError: If it cannot be had, whatever the reason.
    """
    if not name.strip():
        raise input_error(f"the name of a {kind} is empty")
    try:
        document, where = read_document(name, PACKAGE, folder, kind)
        refuse_monsters(document, where)
        return document, where
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a name no file system takes: too long, a NUL, ~nobody
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        raise input_error(f"cannot be read: {error}"[:200], where=shown.encode("utf-8", "replace").decode()) from None


def refuse_monsters(document: Any, where: str) -> None:
    """Refuse what no file of ours holds and no error message could show.

    YAML's aliases let a short text stand for more values than memory holds, or for itself; an
    integer may have more digits than Python prints.

    Raises:
        InputError: Beyond ``MOST_VALUES`` values, ``MOST_DEPTH`` levels, or an integer of 60 digits.
    """
    waiting: list[tuple[Any, int]] = [(document, 0)]
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise input_error(f"is nested more than {MOST_DEPTH} deep", where=where)
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, (list, tuple, set)):
            waiting += [(inner, depth + 1) for inner in value]
        elif isinstance(value, int) and value.bit_length() > 200:
            raise input_error("holds a number of more than 60 digits", where=where)
    raise input_error(f"holds more than {MOST_VALUES} values", where=where)


def beside(reference: str, folder: Path | None) -> str:
    """A reference as written in a file of that folder: a path is meant relative to it, a name stays a name."""
    if folder is None or not looks_like_path(reference) or reference.startswith("~"):
        return reference
    return str(folder / reference)


def within(error: InputError, field: str) -> list[Problem]:
    """The problems of another file, under the field that named it."""
    head = f"{error.where}: " if error.where else ""
    return [Problem(field, f"{head}{problem}") for problem in error.problems]
