"""One rank's run from its first connection to its report."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..scenarios.result import MemoryParts
from ..scenarios.scenario import Scenario
from ..topology.errors import input_error
from .checkpoint import Progress, Saver, checkpoints, load, read_progress
from .clock import clock_of
from .comm import CommLog
from .data import Batches, open_tokens
from .grid import build_grid
from .loop import Trainer
from .measure import RankReport, RankStep, read_step
from .memory import MemoryMeter, load_average
from .options import TrainOptions
from .parallel.replicas import PARTS

PROFILED = 3  # steps that a profiler watches, at the end of a run


class TrainingError(RuntimeError):
    """A run that cannot go on, with the reason for people."""


@dataclass(frozen=True)
class Seat:
    """Where a rank sits.

    Attributes:
        rank: Of the job.
        world: Ranks of the job.
        local_rank: On its node.
        store: How the ranks find each other; of this attempt alone.
    """

    rank: int
    world: int
    local_rank: int
    store: Any


@dataclass(frozen=True)
class StepNews:
    """What rank 0 tells of a step while the run goes on."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    memory_bytes: float


Tell = Callable[[StepNews], None]


def device_of(scenario: Scenario, options: TrainOptions, local_rank: int) -> torch.device:
    """The device of a rank: with GPUs the one that the scenario's placement names for its place on the node.

    Raises:
        InputError: If there is no such device.
    """
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    there = torch.cuda.device_count()
    order = scenario.placement.device_order
    index = order[local_rank] if order is not None and local_rank < len(order) else local_rank
    if index >= there:
        raise input_error(
            f"rank {local_rank} of this node wants device {index}, but the node has {there}; "
            f"use at most {there} ranks a node, or --device cpu",
            field="devices",
        )
    return torch.device("cuda", index)


def run_rank(
    scenario: Scenario, options: TrainOptions, seat: Seat, tell: Tell, stop: Callable[[], bool]
) -> list[RankReport] | None:
    """Train as one rank; all ranks' reports on rank 0, None on the others.

    Args:
        scenario: What is trained, found to be what the trainer runs.
        options: How.
        seat: Which rank this is.
        tell: Told of each step, on rank 0.
        stop: Whether to stop after this step; one rank's word is enough.

    Raises:
        InputError: If data or checkpoint cannot be used.
        TrainingError: If the loss is no number.
        OSError: If a checkpoint cannot be written.
    """
    device = device_of(scenario, options, seat.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a rank is a process of one core
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=seat.store,
        rank=seat.rank,
        world_size=seat.world,
        timeout=datetime.timedelta(seconds=options.timeout_s),
    )
    try:
        return _Run(scenario, options, seat, device).train(tell, stop)
    finally:
        with contextlib.suppress(Exception):  # a group whose peers are gone cannot be left in order
            dist.destroy_process_group()


class _Run:
    """A rank's run once the ranks have met."""

    def __init__(self, scenario: Scenario, options: TrainOptions, seat: Seat, device: torch.device) -> None:
        self.scenario, self.options, self.seat, self.device = scenario, options, seat, device
        self.meter = MemoryMeter(device)
        tokens = open_tokens(options.data or scenario.training.data, scenario.model.vocab)
        self.data_digest = tokens.digest
        self.batches = Batches(tokens, scenario.training.seq_len, scenario.training.global_batch, options.seed)
        self.log = CommLog(clock_of(device))
        grid = build_grid(scenario, seat.rank, device, self.log)
        self._set_clocks()
        # Checkpoints are written beside the training, so in a group of their own, and from the host's memory.
        self.files = None if options.checkpoint is None else dist.new_group(backend="gloo")
        self.meter.begin()
        self.trainer = Trainer(scenario, grid, options.seed, options.learning_rate, balanced=options.balanced)
        self.start = self._resume()
        self.saver = None if options.checkpoint is None else Saver(options.checkpoint, seat.rank, self.files)
        self.saved = self.start
        self.meter.reset()

    def _set_clocks(self) -> None:
        """Ranks on several hosts count from a moment that they share to within a message's latency."""
        hosts: list[Any] = [None] * self.seat.world
        dist.all_gather_object(hosts, socket.gethostname())
        if len(set(hosts)) > 1:
            for _ in range(3):  # the first makes connections
                dist.barrier()
            self.log.clock.start_together()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Take up the last whole checkpoint, if there is one; gives the steps done."""
        folder = self.options.checkpoint
        found = [str(path) for path in checkpoints(folder)[-1:]] if folder is not None else []
        if self.seat.world > 1:  # rank 0's word, as file systems may differ for a moment
            dist.broadcast_object_list(words := [found], src=0)
            (found,) = words
        if not found:
            return 0
        path = Path(found[0])
        progress = read_progress(path)
        self._check(progress, path)
        trainer = self.trainer
        state = trainer.replicas.state(trainer.optimizer)
        trainer.replicas.load(load(path, state, self.files), trainer.optimizer)
        for held in trainer.optimizer.state.values():
            held["step"].fill_(float(progress.updates))
        trainer.scale.scale, trainer.scale.good_steps = progress.loss_scale, progress.good_steps
        return progress.step

    def _check(self, progress: Progress, path: Path) -> None:
        where, model = str(path), self.scenario.model.model_dump(mode="json")
        ignored = {"name", "source", "note"}
        for key, value in model.items():
            if key not in ignored and progress.model.get(key) != value:
                raise input_error(
                    f"is of another model: {key} is {progress.model.get(key)} there and {value} here", where=where
                )
        for key, value in self._order().items():
            if progress.training.get(key) != value:
                raise input_error(
                    f"was trained with {key}={progress.training.get(key)}, not {value}; the data's order would change",
                    where=where,
                )
        if progress.data != self.data_digest:
            raise input_error("was trained on other data; give the same file, or another --checkpoint", where=where)
        if progress.step >= self.options.steps:
            raise input_error(
                f"has {progress.step} steps done and the run is to have {self.options.steps}; "
                f"set --steps above {progress.step}",
                where=where,
            )

    def _order(self) -> dict[str, Any]:
        training = self.scenario.training
        return {"seq_len": training.seq_len, "global_batch": training.global_batch, "seed": self.options.seed}

    def _save(self, done: int) -> None:
        assert self.saver is not None
        trainer = self.trainer
        state = trainer.replicas.state(trainer.optimizer)
        updates = next(iter(trainer.optimizer.state.values()))["step"]
        progress = Progress(
            step=done,
            updates=int(updates),
            seed=self.options.seed,
            loss_scale=trainer.scale.scale,
            good_steps=trainer.scale.good_steps,
            data=self.data_digest,
            model=self.scenario.model.model_dump(mode="json"),
            training=self._order(),
        )
        self.saver.begin(state, progress)
        self.saved = done

    # --- the loop -----------------------------------------------------------------------------------------------

    def train(self, tell: Tell, stop: Callable[[], bool]) -> list[RankReport] | None:
        """All steps; the reports of all ranks on rank 0."""
        steps: list[RankStep] = []
        disturbed, profiled = set[int](), set[int]()
        with _events(self.options, self.seat) as write:
            for number in range(self.start, self.options.steps):
                watched = self.options.profile is not None and number >= self.options.steps - PROFILED
                if watched and not profiled:
                    self._profile_begins()
                try:
                    step, stopped = self._step(number, stop)
                except TrainingError:  # on every rank alike
                    if self.saver is not None:
                        self.saver.finish()
                    raise
                steps.append(step)
                if watched:
                    profiled.add(number)
                    disturbed.add(number)
                if self.saver is not None:
                    if self.saver.busy:
                        disturbed.add(number)
                    self.saver.poll()
                last = number + 1 == self.options.steps or stopped
                if self.saver is not None and ((number + 1) % self.options.checkpoint_every == 0 or last):
                    self._save(number + 1)
                    disturbed.add(number + 1)
                if self.seat.rank == 0:
                    news = self._news(step)
                    tell(news)
                    write(news, step)
                if stopped:
                    break
        if profiled:
            self._profile_ends()
        if self.saver is not None:
            self.saver.finish()
        return self._reports(steps, frozenset(disturbed), frozenset(profiled))

    def _step(self, number: int, stop: Callable[[], bool]) -> tuple[RankStep, bool]:
        began = time.perf_counter()
        first, count = self.trainer.rows
        batch = self.batches.rows(number, first, count)
        data_s = time.perf_counter() - began
        record = self.trainer.step(number, batch, stop=stop())
        bad = [
            (what, value)
            for what, value in (("loss", record.loss), ("gradients' norm", record.norm))
            if not np.isfinite(value)
        ]
        if bad and not (record.skipped and self.trainer.scale.scale > 1.0):
            also = ", or train in bf16" if self.scenario.training.precision == "fp16" else ""
            rate, (what, value) = self.options.learning_rate, bad[0]
            raise TrainingError(f"the {what} of step {number} is {value}: lower --learning-rate (now {rate:g}){also}")
        return read_step(record, self.log.clock, data_s), record.stopped

    def _news(self, step: RankStep) -> StepNews:
        seconds = step.step_s + step.data_s
        return StepNews(
            step.step,
            self.options.steps,
            step.loss,
            self.scenario.tokens_per_step / seconds,
            self.meter.peak_bytes(),
        )

    def _profile_begins(self) -> None:
        if self.seat.rank == 0:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.__enter__()

    def _profile_ends(self) -> None:
        if self.seat.rank == 0 and self.options.profile is not None:
            self._profiler.__exit__(None, None, None)
            beside = self.options.profile.with_name(f"{self.options.profile.name}.partial")
            try:
                self._profiler.export_chrome_trace(str(beside))
                beside.replace(self.options.profile)
            except (OSError, RuntimeError) as error:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise OSError(f"the trace {self.options.profile} could not be written: {error}") from error

    # --- the report ---------------------------------------------------------------------------------------------

    def _reports(
        self, steps: list[RankStep], disturbed: frozenset[int], profiled: frozenset[int]
    ) -> list[RankReport] | None:
        place = self.trainer.grid.place
        peak = self.meter.peak_bytes()
        mine = RankReport(
            rank=self.seat.rank,
            place=(place.pp, place.dp, place.cp, place.tp),
            host=socket.gethostname(),
            parameters=self.trainer.parameters,
            steps=tuple(steps),
            disturbed=disturbed,
            profiled=profiled,
            memory=memory_parts(self.trainer, peak),
            peak_bytes=peak,
            reserved_bytes=self.meter.reserved_bytes(),
            environment=_environment(self.device),
        )
        if self.seat.world == 1:
            return [mine]
        everyone: list[Any] | None = [None] * self.seat.world if self.seat.rank == 0 else None
        dist.gather_object(mine, everyone, dst=0)
        return everyone


def memory_parts(trainer: Trainer, peak_bytes: float) -> MemoryParts:
    """What a rank holds for certain, and activations as what its peak has beside that."""
    held = trainer.replicas.bytes_held()
    master = 0.0 if trainer.dtype == torch.float32 else 4.0
    optimizer = sum(run.master.numel() for run in trainer.replicas.owned) * (master + 4.0 * (len(PARTS) - 1))
    known = held["parameters"] + held["gradients"] + optimizer
    return MemoryParts(
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=optimizer,
        activations=max(peak_bytes - known, 0.0),
    )


def _environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load_average(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["hip"] = torch.version.hip
    return found


@contextlib.contextmanager
def _events(options: TrainOptions, seat: Seat) -> Iterator[Callable[[StepNews, RankStep], None]]:
    """What writes TensorBoard's events, on rank 0 where they are asked for."""
    if options.tensorboard is None or seat.rank != 0:
        yield lambda news, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(options.tensorboard)) as writer:

        def write(news: StepNews, step: RankStep) -> None:
            writer.add_scalar("loss", step.loss, step.step)
            writer.add_scalar("gradient norm", step.norm, step.step)
            writer.add_scalar("step seconds", step.step_s + step.data_s, step.step)
            writer.add_scalar("tokens per second", news.tokens_per_s, step.step)
            writer.add_scalar("memory bytes", news.memory_bytes, step.step)

        yield write
