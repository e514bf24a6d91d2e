"""Whether this installation is whole: what there is, and a first prediction."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from .._version import __version__
from .show import KINDS, names, show_one
from .terminal import Screen, open_console, plain_table

TRIAL = "frontier-22b"
DEVICES = Path("/dev")
TORCH_NEEDED = re.compile(r"^torch\s*>=\s*([\d.]+)", re.MULTILINE)
TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    detail: str

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def examine() -> list[Check]:
    """Look at everything; what fails is a check that is not ok, never an exception."""
    checks = [Check("exatwin", True, f"{__version__} in {_place()}"), _python()]
    checks += [
        _package(requirement) for requirement in metadata.requires("exatwin") or [] if "extra ==" not in requirement
    ]
    checks += [_torch(), _terminal()]
    checks += [_attempt(f"bundled {kind}", lambda kind=kind: _bundled(kind)) for kind in KINDS]  # type: ignore[misc]
    checks.append(_attempt("a prediction", _predict))
    return checks


def doctor_view(checks: Sequence[Check], screen: Screen) -> RenderableType:
    """The checks for people."""
    table = plain_table("looked at", "", "found", left=("", "found"))
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "WRONG", check.detail, style=None if check.ok else "bold red")
    return table


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except Exception as error:  # whatever is broken here is what the check is for
        return Check(
            name, False, f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        )


def _place() -> str:
    spec = importlib.util.find_spec("exatwin")
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else "an unknown place"


def _python() -> Check:
    return Check("python", sys.version_info >= (3, 11), f"{platform.python_version()} ({platform.platform()})")


def _package(requirement: str) -> Check:
    name = re.split(r"[<>=!~ ;\[]", requirement)[0]
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, False, f"is missing; exatwin needs {requirement}")
    least = re.search(r">=\s*([\d.]+)", requirement)
    ok = least is None or _numbers(found) >= _numbers(least[1])
    return Check(name, ok, found if ok else f"{found}; exatwin needs {requirement}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _torch() -> Check:
    """Torch is an extra that ``exatwin train`` alone needs; importing it takes seconds, so it is only looked at."""
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", True, "not installed: exatwin train needs it (pip install 'exatwin[trainer]')")
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        return Check("torch", True, f"{found}, but it cannot be imported: exatwin train needs it; install it anew")
    least, *_ = TORCH_NEEDED.findall("\n".join(metadata.requires("exatwin") or [])) or [
        ""
    ]  # of the extras that name it
    old = f"; exatwin train needs {least} or newer" if _numbers(found) < _numbers(least) else ""
    return Check("torch", True, f"{found}, for exatwin train: {_backends(Path(folders[0]))}{old}")


def _backends(torch: Path) -> str:
    """What ranks talk over with this build of torch, by its own account and by the devices of this host."""
    try:
        build = dict(TORCH_BUILD.findall((torch / "version.py").read_text(encoding="utf-8")))
    except OSError:
        build = {}
    for kind, library, devices in (("hip", "rccl", "dri/renderD*"), ("cuda", "nccl", "nvidia[0-9]*")):
        if kind in build:
            count = len(list(DEVICES.glob(devices)))
            word = {"hip": "ROCm", "cuda": "CUDA"}[kind]
            if count:
                return f"{library} ({word} {build[kind]}) on {count} GPU{'s' if count > 1 else ''}, gloo on the cores"
            return f"gloo on the cores; {library} ({word} {build[kind]}) has no GPU here"
    return "gloo on the cores of this host; this build has no GPUs"


def _terminal() -> Check:
    console = open_console(sys.stdout)
    kind = f"{console.width} columns, {console.color_system or 'no'} colour, {console.encoding}"
    return Check(
        "terminal", True, f"{kind}, TERM={os.environ.get('TERM', '')}" if console.is_terminal else f"none; {kind}"
    )


def _bundled(kind: str) -> str:
    found = names(kind)
    if not found:
        raise ValueError("none; the installation is not complete")
    wrong = []
    for name in found:
        try:
            show_one(kind, name)
        except Exception as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return f"{len(found)}: {', '.join(found)}" if len(found) <= 20 else f"{len(found)}"


def _predict() -> str:
    from ..scenarios.scenario import load_scenario
    from ..sim.predict import predict

    began = time.perf_counter()
    prediction = predict(load_scenario(TRIAL))
    took_s = time.perf_counter() - began
    return f"{TRIAL}: a step of {prediction.step_s:.1f} s, predicted in {took_s:.2f} s"
