"""Runs that are over in a second: a model of four thin layers on one to four ranks."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exatwin.scenarios.scenario import Scenario, load_scenario
from exatwin.trainer.launch import Outcome, launch
from exatwin.trainer.options import TrainOptions

SMALL = (
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.vocab=256",
    "model.vocab_multiple=10",
    "training.seq_len=16",
    "training.global_batch=8",
    "layout.micro_batch=1",
)


def small(*changes: str, **layout: Any) -> Scenario:
    """The small scenario with other fields; as many devices as the layout says."""
    layout = {"tp": 1, "pp": 1, "dp": 1, **layout}
    devices = layout["tp"] * layout["pp"] * layout["dp"] * layout.get("cp", 1)
    words = [f"layout.{key}={str(value).lower()}" for key, value in layout.items()]
    return load_scenario("local-gpt-10m", (*SMALL, f"devices={devices}", *words, *changes))


def text(folder: Path, name: str = "text", length: int = 4000) -> str:
    """A file to train on, which no test needs to wait for."""
    path = folder / name
    path.write_bytes(bytes((7 * i + i // 13) % 250 for i in range(length)))
    return str(path)


def run(scenario: Scenario, data: str, steps: int, **options: Any) -> tuple[list[float], Outcome]:
    """Losses of the steps that a run does, and how it ended."""
    told: Callable[[str], None] = options.pop("note", lambda text: None)
    outcome = launch(scenario, TrainOptions(steps=steps, data=data, device="cpu", **options), lambda news: None, told)
    assert outcome.reports is not None
    return [step.loss for step in outcome.reports[0].steps], outcome


def marked(name: str, value: str) -> list[int]:
    """Processes that have a variable in their environment, this one left out."""
    wanted, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def arguments(scenario_changes: Sequence[str] = (), **layout: int) -> list[str]:
    """What the command line takes for the small scenario."""
    layout = {"tp": 1, "pp": 1, "dp": 1, **layout}
    devices = layout["tp"] * layout["pp"] * layout["dp"]
    words = [*SMALL, f"devices={devices}", *(f"layout.{key}={value}" for key, value in layout.items())]
    return ["train", "local-gpt-10m", *(f"--set={word}" for word in (*words, *scenario_changes))]
