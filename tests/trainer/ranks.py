"""Ranks for tests: forked processes that meet over gloo, and training runs on them told in few words."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import exatwin.trainer.model as model_module  # noqa: E402
from exatwin.scenarios.scenario import Scenario, scenario_from_document  # noqa: E402
from exatwin.trainer.clock import Clock  # noqa: E402
from exatwin.trainer.comm import Channel, CommLog  # noqa: E402
from exatwin.trainer.grid import Grid, Place, build_grid  # noqa: E402
from exatwin.trainer.initial import initial  # noqa: E402
from exatwin.trainer.loop import Trainer  # noqa: E402
from exatwin.trainer.optimizer import BETAS  # noqa: E402

LONGEST_S = 120.0  # that ranks may take: far more than any test does, for machines that are busy
DOCUMENT = {
    "name": "ranks",
    "machine": "dgx-h100",  # of which only the number of devices matters here
    "framework": "exatwin",
    "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 250, "vocab_multiple": 8},
    "training": {"seq_len": 32, "global_batch": 8, "precision": "bf16"},
    "layout": {"micro_batch": 2, "dp": 1},
}


# --- processes ------------------------------------------------------------------------------------------------------


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, longest_s: float = LONGEST_S) -> list[Any]:
    """What a function gives on each of so many ranks; it is called with the rank and the arguments.

    Raises:
        AssertionError: If it raises on some rank (with that rank's traceback), or they do not end in time.
    """
    context = multiprocessing.get_context("fork")  # torch is there already, so a rank starts in some milliseconds
    with tempfile.TemporaryDirectory() as folder:
        ours: dict[Connection, int] = {}
        processes = []
        results: dict[int, Any] = {}
        until = time.monotonic() + longest_s
        try:
            for rank in range(world):
                here, there = context.Pipe(duplex=False)
                store = Path(folder, "store")
                process = context.Process(target=_rank, args=(rank, world, store, there, function, arguments))
                process.start()
                there.close()
                ours[here] = rank
                processes.append(process)
            while ours:
                ready = wait(list(ours), max(until - time.monotonic(), 0.0))
                assert ready, f"ranks {sorted(ours.values())} of {world} did not end within {longest_s:g} s"
                failures = []
                for connection in ready:
                    rank = ours.pop(connection)
                    try:
                        well, results[rank] = connection.recv()
                    except EOFError:
                        well, results[rank] = False, "it ended without a word"
                    if not well:
                        failures.append(f"rank {rank} of {world} failed:\n{results[rank]}")
                assert not failures, "\n".join(failures)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int, world: int, store: Path, told: Connection, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        result = function(rank, *arguments)
        dist.barrier()  # none leaves while another still talks to it
    except BaseException:
        told.send((False, traceback.format_exc()))
    else:
        told.send((True, result))


@pytest.fixture(autouse=True, scope="session")
def quiet_ranks():
    """One thread a process, and no name to be looked up; imported by the modules that start ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


# --- training on them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a rank saw.

    Attributes:
        losses: Of each step.
        norms: Of each step.
        gradients: Of the first step, summed over all ranks and clipped: of the parameters of this rank's stages, each
            whole, by name.
        skipped: Whether each step was.
        scales: What the loss is multiplied by, after each step.
        weights: At the end, in the same way.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    skipped: list[bool]
    scales: list[float]
    weights: dict[str, np.ndarray]


def scenario_of(changes: str = "", precision: str = "fp32") -> Scenario:
    """The small scenario with changes as ``--set`` takes them, apart by spaces; those without a dot are the layout's.

    >>> scenario_of("tp=2 model.layers=8").devices
    2
    """
    fields = [change if "." in change.partition("=")[0] else f"layout.{change}" for change in changes.split()]
    scenario = scenario_from_document(DOCUMENT, "ranks", fields)
    # The machine prints no peak for fp32, which only a prediction would need.
    return replace(scenario, training=scenario.training.model_copy(update={"precision": precision}))


@contextmanager
def lively_weights():
    """First values at which mistakes show: biases are not 0, norms not 1, scores of attention not all alike."""

    def lively(name: str, shape: Sequence[int], seed: int, *, kind: str = "weight", **more: Any) -> torch.Tensor:
        values = initial(name, shape, seed, kind=kind, **more)
        if kind in ("zero", "one"):
            noise = np.random.default_rng([len(name), *name.encode()]).standard_normal(values.numel())
            return values + 0.1 * torch.from_numpy(noise).float().view_as(values)
        return 5 * values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "initial", lively)
        yield


def grid_of(scenario: Scenario, rank: int) -> Grid:
    """The grid of a rank on a CPU."""
    return build_grid(scenario, rank, torch.device("cpu"), CommLog(Clock()))


def batch_of(scenario: Scenario, step: int) -> np.ndarray:
    """The tokens of a step: the same whatever the layout."""
    shape = scenario.training.global_batch, scenario.training.seq_len + 1
    return np.random.default_rng(step).integers(0, scenario.model.vocab, shape)


def train(rank: int, scenario: Scenario, steps: int = 2, first_scale: float | None = None) -> Run:
    """Train as a rank, or alone where no process group is."""
    with lively_weights():
        trainer = Trainer(scenario, grid_of(scenario, rank), seed=1, learning_rate=1e-3)
    if first_scale is not None:
        trainer.scale.scale = first_scale
    begin, count = trainer.rows
    run = Run([], [], {}, [], [], {})
    for step in range(steps):
        record = trainer.step(step, batch_of(scenario, step)[begin : begin + count])
        run.losses.append(record.loss)
        run.norms.append(record.norm)
        run.skipped.append(record.skipped)
        run.scales.append(trainer.scale.scale)
        if step == 0:
            state = trainer.replicas.state(trainer.optimizer)
            # Adam's first moment after one step is what it was given, times 1 - beta.
            run.gradients.update(_whole(state, "exp_avg.", 1 - BETAS[0]))
    run.weights.update(_whole(trainer.replicas.state(trainer.optimizer), "weight.", 1.0))
    return run


def _whole(state: dict[str, torch.Tensor], prefix: str, over: float) -> dict[str, np.ndarray]:
    found = {}
    for name, values in state.items():
        if name.startswith(prefix):
            whole = values.full_tensor() if isinstance(values, DTensor) else values
            found[name.removeprefix(prefix)] = (whole / over).detach().numpy().copy()
    return found


def alone(changes: str = "", precision: str = "fp32", steps: int = 2) -> Run:
    """The run of one process that layouts are held against: no group is made, nothing is cut.

    Args:
        changes: Those of a layout, of which the model's are taken.
    """
    model = [change for change in changes.split() if change.startswith(("model.", "training."))]
    return _alone(" ".join(model), precision, steps)


@cache
def _alone(changes: str, precision: str, steps: int) -> Run:
    return train(0, scenario_of(f"{changes} micro_batch=4", precision), steps)


def lone_grid(**groups: tuple[int, int]) -> Grid:
    """The grid of a rank that talks to none; ``tp=(4, 1)`` pretends that it is the second of four."""
    log = CommLog(Clock())
    channels = {}
    for kind in ("world", "tp", "cp", "dp", "shard", "hybrid", "etp", "ep", "edp", "pp", "embedding"):
        size, rank = groups.get(kind, (1, 0))
        channels[kind] = Channel(kind, tuple(range(size)), rank, None, log)
    place = Place(0, 0, 0, 0, channels["tp"].rank)
    return Grid(place, torch.device("cpu"), log, None, None, channels)
