"""Figures of a device that several calibrations share: each stands once, in ``sim/devices/``.

A calibration says ``compute: a100``, or ``compute: {device: a100, memory_fraction: ...}`` where
its stack reaches something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..topology.errors import input_error
from ..topology.files import bundled_names, read_document

PACKAGE = "exatwin.sim"
FOLDER = "devices"

ABOUT = ("name", "devices", "date", "note")
"""Keys of a device file that are no figures."""


def device_names() -> list[str]:
    """Names of the bundled devices."""
    return bundled_names(PACKAGE, FOLDER)


def device_figures(name: str) -> dict[str, Any]:
    """The figures of a device file, bundled or a path, as its document holds them.

    Raises:
        InputError: If there is no such file.
    """
    document, _ = read_document(name, PACKAGE, FOLDER, "device")
    return {key: value for key, value in document.items() if key not in ABOUT}


def with_device(document: dict[str, Any], where: str) -> dict[str, Any]:
    """A calibration's document with the figures of the device it names; its own figures win.

    Args:
        document: The fields of a calibration file.
        where: The name that errors carry.

    Raises:
        InputError: If it names no device, or one that is not bundled and no file.
    """
    compute = document.get("compute")
    if isinstance(compute, str):
        compute = {"device": compute}
    if not (isinstance(compute, Mapping) and "device" in compute):
        return document
    own = dict(compute)
    name = own.pop("device")
    if not isinstance(name, str):
        message = f"the name of a device is needed, such as {', '.join(device_names())}, but it is {name!r}"
        raise input_error(message, where=where, field="compute.device")
    return {**document, "compute": _over(device_figures(name), own)}


def _over(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``own`` says in its place, mapping by mapping; a figure is replaced whole."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        nested = isinstance(below, Mapping) and isinstance(value, Mapping) and not ({"value", "source"} & set(value))
        merged[key] = _over(dict(below), value) if nested and isinstance(below, Mapping) else value
    return merged
