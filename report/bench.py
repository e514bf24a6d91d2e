"""What one prediction costs on this host, and what the network alone does: ``make bench``.

Times are the best of a few runs and stand beside the load of the machine; events and solves do not depend on it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.text import Text

from ..scenarios.result import Prediction
from ..scenarios.scenario import Scenario, load_scenario
from ..sim import engine
from ..sim.assemble import build_step
from ..sim.calibration import default_calibration
from ..sim.communicate import collective_s
from ..sim.costs import job_cost
from ..sim.network import fair_rates
from ..sim.predict import FOLDED, choose_calibration, predict
from ..sim.timeline import Played
from ..sim.traffic import build_traffic
from ..topology.machine import load_machine
from ..topology.routing import Routes
from .terminal import indented, open_console, plain_table

RUNS = 3
LONG_ENOUGH_S = 1.5  # quick work is repeated for so long: a first run finds no memory laid out yet
QUESTIONS = {
    "frontier-1t": (),
    # The whole first machine of the paper's title, at the same work a replica.
    "frontier-1t, 37,888 GCDs": ("devices=37888", "layout.dp=74", "training.global_batch=118400"),
}


# Overrides of frontier-1t, and CPU seconds in which `des` may lay out the traffic of a step and play it.
ALL = ("devices=75264", "layout.dp=147", "training.global_batch=235200")
PLACEMENTS = {
    "3,072, a stage's replicas adjacent": ((), 0.100),
    "3,072, each replica by itself": (("placement.order=tp-pp-dp",), 0.250),
    "3,072, the same over all groups": (("placement.order=tp-pp-dp", "placement.nodes=spread"), 0.250),
    "3,072, tensor groups spread too": (("placement.order=pp-tp-dp", "placement.nodes=spread"), 0.250),
    "75,264, a stage's replicas adjacent": (ALL, 0.200),
    "75,264, each replica by itself": ((*ALL, "placement.order=tp-pp-dp"), 0.500),
}
FLOWS, LINKS, LINKS_A_FLOW = 10_000, 173_456, 5  # the links of the whole of Frontier, one way each
RING_RANKS, RING_BYTES = 3072, 2**30
SOLVE_S = RING_S = 0.010

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Timing:
    """One prediction at one fidelity: best CPU and wall seconds of the runs, and the answer."""

    fidelity: str
    cpu_s: float
    wall_s: float
    prediction: Prediction


def _repeat(runs: int | None) -> Iterator[None]:
    """So many times; where none is said, `RUNS` times and until `LONG_ENOUGH_S` are over."""
    began = time.perf_counter()
    done = 0
    while done < (runs or RUNS) or (runs is None and time.perf_counter() - began < LONG_ENOUGH_S):
        yield
        done += 1


def time_prediction(scenario: Scenario, fidelity: str, runs: int | None = None) -> Timing:
    """Predict a few times and keep the quickest."""
    cpu_s = wall_s = float("inf")
    for _ in _repeat(runs):
        cpu, wall = time.process_time(), time.perf_counter()
        prediction = predict(scenario, fidelity=fidelity)
        cpu_s, wall_s = min(cpu_s, time.process_time() - cpu), min(wall_s, time.perf_counter() - wall)
    return Timing(fidelity, cpu_s, wall_s, prediction)


@dataclass(frozen=True)
class EngineTiming:
    """CPU seconds of the two parts of a step that know the network, and what was played."""

    traffic_s: float
    play_s: float
    played: Played


def best_of(runs: int | None, work: Callable[[], ResultT]) -> tuple[float, ResultT]:
    """Least CPU seconds of a few runs, and what the last one returned."""
    least = float("inf")
    for _ in _repeat(runs):
        began = time.process_time()
        result = work()
        least = min(least, time.process_time() - began)
    return least, result


def time_engine(scenario: Scenario, runs: int | None = None) -> EngineTiming:
    """Lay out the traffic of a scenario and play its step, without the costs of its ops."""
    calibration = choose_calibration(scenario)
    traffic_s, traffic = best_of(runs, lambda: build_traffic(scenario, calibration))
    step = build_step(scenario, calibration, job_cost(scenario, calibration, traffic), traffic)
    play_s, played = best_of(runs, lambda: engine.play(step, traffic.classes))
    return EngineTiming(traffic_s, play_s, played)


def time_solve(runs: int | None = None, seed: int = 1) -> dict[str, float]:
    """CPU seconds of one max-min solve of random flows, by what they cross."""
    generator = np.random.default_rng(seed)
    link = np.unique(np.arange(FLOWS)[:, None] * LINKS + generator.integers(0, LINKS, (FLOWS, LINKS_A_FLOW)))
    flow, link = link // LINKS, link % LINKS
    capacity = generator.uniform(25e9, 100e9, LINKS)
    routes = Routes(load_machine("frontier"), 9408)
    ends = generator.integers(0, 8 * routes.nodes, (2, FLOWS))
    hops = routes.route(*ends)
    order = np.lexsort((hops.link, hops.message))
    cases = {
        f"on {LINKS_A_FLOW} of {LINKS:,} links each": (flow, link, np.ones(len(link)), capacity),
        "between GCDs of Frontier": (hops.message[order], hops.link[order], hops.share[order], routes.capacity),
    }
    seconds = {}
    for name, (flows, links, weight, limit) in cases.items():
        used, numbered = np.unique(links, return_inverse=True)
        seconds[name], _ = best_of(runs, partial(fair_rates, FLOWS, flows, numbered, weight, limit[used]))
    return seconds


def time_ring(runs: int | None = None) -> tuple[float, float]:
    """CPU seconds of one ring all-reduce over all its links, and its seconds on the machine."""
    machine = load_machine("frontier")
    figures = default_calibration(machine).network
    ranks = np.arange(RING_RANKS)

    def ring() -> float:
        routes = Routes(machine, RING_RANKS // machine.devices_per_node)
        return collective_s("all_reduce", RING_BYTES, ranks, routes, figures, algorithm="ring").seconds

    return best_of(runs, ring)


def main() -> None:
    """Print the table."""
    console = open_console(sys.stdout)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load {load}, CPython {platform.python_version()}, best of {RUNS} or more")
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
    _print_network(console)
    console.print(indented("a prediction from a scenario already read; start-up and imports come on top", "dim"))


def _print_network(console: Console) -> None:
    table = plain_table("GCDs of frontier-1t", "traffic", "play", "both", "asked", "solves", whole=True)
    for name, (overrides, most_s) in PLACEMENTS.items():
        timing = time_engine(load_scenario("frontier-1t", overrides))
        both_s = timing.traffic_s + timing.play_s
        times = [_milliseconds(seconds) for seconds in (timing.traffic_s, timing.play_s, both_s, most_s)]
        table.add_row(name, *times, f"{timing.played.solves:,}")
    console.print(Text("\none step with contention: its traffic laid out, and played", style="bold"), table, sep="\n")
    table = plain_table("alone", "CPU", "asked", whole=True)
    for name, seconds in time_solve().items():
        table.add_row(f"rates of {FLOWS:,} flows {name}", _milliseconds(seconds), _milliseconds(SOLVE_S))
    seconds, ring_s = time_ring()
    name = f"a ring all-reduce of 1 GiB over {RING_RANKS:,} GCDs ({ring_s * 1e3:,.1f} ms there)"
    table.add_row(name, _milliseconds(seconds), _milliseconds(RING_S))
    console.print(table)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds > 0.02 else f"{seconds * 1e3:,.1f} ms"


if __name__ == "__main__":
    main()
