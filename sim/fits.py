"""Fitted figures of a calibration, in files of their own: ``sim/fits/<calibration>.yaml``.

A fit on published runs is made anew by a command, so what it writes is kept apart from what
people wrote and read. The file's figures take the place of the calibration's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..topology.files import bundled_names, read_document

PACKAGE = "exatwin.sim"
FOLDER = "fits"
SOURCE = "exatwin-fit"
SUSTAINED = "compute.sustained"


def with_fit(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A calibration's document with the figures that a bundled fit gives it; as it is where there is none.

    ``sustained_as`` names the fit whose `SUSTAINED` it takes: the same software on the same device elsewhere.

    Args:
        document: The fields of a calibration file, its device's figures among them.
        name: What it was asked for by; a file of one's own has no bundled fit, whatever it calls itself.
    """
    document = dict(document)
    other = document.pop("sustained_as", None)
    if other is not None:
        found, _ = read_document(other, PACKAGE, FOLDER, "fit")
        document = with_values(document, {SUSTAINED: found["figures"][SUSTAINED]}, f"rows of the fit of {other}")
    if name not in bundled_names(PACKAGE, FOLDER):
        return document
    found, _ = read_document(name, PACKAGE, FOLDER, "fit")
    fit = {"parameters": list(found["figures"]), "command": found["command"], "residuals": found["residuals"]}
    return {**with_values(document, found["figures"]), "fit": fit}


def with_values(document: dict[str, Any], figures: Mapping[str, Any], at: str = "rows of fit") -> dict[str, Any]:
    """A calibration's document with fitted values in place of some figures, by dotted path.

    Args:
        document: The fields of a calibration file.
        figures: Values by path.
        at: What they say of where they come from.
    """
    for path, value in figures.items():
        document = _replaced(document, path.split("."), value, at)
    return document


def _replaced(place: Any, path: list[str], value: Any, at: str) -> dict[str, Any]:
    """A mapping with one figure in it replaced, or added where it was left out."""
    head, *rest = path
    inside = dict(place) if isinstance(place, dict) else {}
    if rest:
        return {**inside, head: _replaced(inside.get(head), rest, value, at)}
    return {**inside, head: {"value": value, "source": SOURCE, "at": at}}
