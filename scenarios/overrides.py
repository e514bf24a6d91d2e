"""``--set layout.tp=4``: fields of a scenario replaced from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from ..topology.errors import InputError, Problem, nearest
from .model import model_document
from .reading import within


def apply_overrides(fields: dict[str, Any], overrides: Sequence[str], where: str, known: Iterable[str]) -> None:
    """Replace fields in place, before anything is checked.

    A key may name an entry of a list by its number. A field of a model that is given by name
    turns the name into that model's fields, and the field is replaced among them.

    Args:
        fields: The document.
        overrides: ``layout.tp=4``; the value is read as YAML.
        where: The name that errors carry.
        known: Top-level keys, for the error about another one.

    Raises:
        InputError: With every option that cannot be applied.
    """
    keys = list(known)
    problems = []
    for option in overrides:
        message = _apply(fields, option, keys)
        if message:
            problems.append(Problem(f"--set {option}", message))
    if problems:
        raise InputError(where, problems)


def _apply(fields: dict[str, Any], option: str, known: list[str]) -> str:
    """Replace one field in place; what is wrong with the option, or nothing."""
    path, equals, text = option.partition("=")
    parts = [part.strip() for part in path.split(".")]
    if not equals:
        return "must be key=value, such as layout.tp=4"
    if not all(parts):
        return "has an empty key; write it like layout.tp=4"
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return f"the value {text[:40]!r} is not valid YAML"
    if len(parts) > 1 and parts[0] == "model" and isinstance(fields.get("model"), str):
        try:
            document, _ = model_document(fields["model"].strip())
        except InputError as error:
            return "; ".join(map(str, within(error, "model")))
        name = document.get("name", fields["model"])
        fields["model"] = document | ({"name": f"{name} (changed)"} if isinstance(name, str) else {})
    here: Any = fields
    try:
        for depth, part in enumerate(parts[:-1]):
            key = _key(here, part, ".".join(parts[:depth]), known)
            if isinstance(here, dict) and key not in here:
                here[key] = {}
            here = here[key]
        here[_key(here, parts[-1], ".".join(parts[:-1]), known)] = value
    except LookupError as error:
        return str(error.args[0])
    return ""


def _key(here: Any, part: str, at: str, known: list[str]) -> str | int:
    """The key of a mapping or the index of a list that a part of the option stands for.

    Raises:
        LookupError: If there is none, with the reason.
    """
    if isinstance(here, dict):
        if not at and part not in known:
            raise LookupError(f"unknown key {part}{nearest(part, known)}")
        return part
    if isinstance(here, list):
        index = int(part) if part.isascii() and part.isdigit() and len(part) < 9 else len(here)
        if index >= len(here):
            raise LookupError(f"{at} has entries 0 to {len(here) - 1}; there is no {part}")
        return index
    raise LookupError(f"{at} is {str(here)[:40]}, which has no field {part}")
