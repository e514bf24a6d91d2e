"""What one prediction costs on this host: ``make bench``.

Times are the best of a few runs and stand beside the load of the machine; events and solves do not depend on it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass

from rich.text import Text

from ..scenarios.result import Prediction
from ..scenarios.scenario import Scenario, load_scenario
from ..sim.predict import FOLDED, predict
from .terminal import indented, open_console, plain_table

RUNS = 3
QUESTIONS = {
    "frontier-1t": (),
    # The whole first machine of the paper's title, at the same work a replica.
    "frontier-1t, 37,888 GCDs": ("devices=37888", "layout.dp=74", "training.global_batch=118400"),
}


@dataclass(frozen=True)
class Timing:
    """One prediction at one fidelity: best CPU and wall seconds of the runs, and the answer."""

    fidelity: str
    cpu_s: float
    wall_s: float
    prediction: Prediction


def time_prediction(scenario: Scenario, fidelity: str, runs: int = RUNS) -> Timing:
    """Predict a few times and keep the quickest."""
    cpu_s = wall_s = float("inf")
    for _ in range(runs):
        cpu, wall = time.process_time(), time.perf_counter()
        prediction = predict(scenario, fidelity=fidelity)
        cpu_s, wall_s = min(cpu_s, time.process_time() - cpu), min(wall_s, time.perf_counter() - wall)
    return Timing(fidelity, cpu_s, wall_s, prediction)


def main() -> None:
    """Print the table."""
    console = open_console(sys.stdout)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load {load}, CPython {platform.python_version()}, best of {RUNS}")
    for name, overrides in QUESTIONS.items():
        scenario = load_scenario("frontier-1t", overrides)
        table = plain_table("fidelity", "CPU", "wall", "step", "ops", "events", "events/op", "solves", whole=True)
        for fidelity in FOLDED:
            timing = time_prediction(scenario, fidelity)
            engine = timing.prediction.engine
            table.add_row(
                fidelity,
                f"{timing.cpu_s * 1e3:,.0f} ms",
                f"{timing.wall_s * 1e3:,.0f} ms",
                f"{timing.prediction.step_s:,.2f} s",
                f"{engine.ops:,}",
                f"{engine.events:,}",
                f"{engine.events / engine.ops:.3f}",
                f"{engine.solves:,}",
            )
        console.print(Text(f"\n{name}", style="bold"), table, sep="\n")
    console.print(indented("a prediction from a scenario already read; start-up and imports come on top", "dim"))


if __name__ == "__main__":
    main()
