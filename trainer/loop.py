"""One rank's training: builds its part of the model, and runs step after step.

Shapes: B sequences in a micro-batch, S tokens of each on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from ..scenarios.fields import Precision
from ..scenarios.scenario import Scenario
from .comm import Call
from .grid import Grid, stages_of
from .model import Build, Embedding, Stage
from .optimizer import FIRST_SCALE, LossScale, adam, update
from .parallel.context import positions
from .parallel.data import replicas_of, storage_type
from .parallel.pipeline import Done, build_pipeline
from .parallel.replicas import Replicas, holders_of
from .parallel.tensor import cross_entropy, local

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepRecord:
    """What a rank notes of one step; points in time are the clock's.

    Attributes:
        loss: Mean over all tokens of the global batch; the same on every rank.
        norm: Of all gradients before clipping.
        skipped: Whether an overflow left the weights as they were.
        began: Before the first pass.
        passed: After the last backward.
        reduced: After the gradients are summed.
        updated: After the optimizer.
        ended: After the new weights are there.
        done: The passes.
        calls: What was sent.
        second_runs: Between which points recomputation ran.
        noise: Squared norms of the gradients of one replica, on average, and of all; None where they are not known.
        stopped: Whether some rank was asked to stop.
    """

    step: int
    loss: float
    norm: float
    skipped: bool
    began: Any
    passed: Any
    reduced: Any
    updated: Any
    ended: Any
    done: tuple[Done, ...]
    calls: tuple[Call, ...]
    second_runs: tuple[tuple[Any, Any], ...]
    noise: tuple[float, float] | None = None
    stopped: bool = False


@dataclass
class Trainer:
    """One rank of a run.

    Args:
        scenario: What is trained, already found to be what the trainer runs (`refusals`).
        grid: The rank.
        seed: Of the first weights.
        learning_rate: Adam's.
        balanced: Experts by turns, for timing and counts.
    """

    scenario: Scenario
    grid: Grid
    seed: int = 0
    learning_rate: float = 3e-4
    balanced: bool = False
    stages: list[Stage] = field(init=False)
    replicas: Replicas = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scale: LossScale = field(init=False)
    parameters: int = field(init=False)  # that this rank holds before ZeRO shards them

    def __post_init__(self) -> None:
        scenario, grid = self.scenario, self.grid
        self.dtype = DTYPES[scenario.training.precision]
        build = Build(
            scenario.model,
            scenario.layout,
            scenario.training.seq_len,
            scenario.layout.micro_batch,
            grid,
            dtype=self.dtype,
            storage=storage_type(scenario, self.dtype),
            device=grid.device,
            seed=self.seed,
            capacity_factor=scenario.training.capacity_factor,
            balanced=self.balanced,
        )
        self.stages = build_stages(build, stages_of(scenario, grid.place.pp))
        self.parameters = sum(local(parameter).numel() for parameter, _ in holders_of(self.stages))
        self.replicas = replicas_of(scenario, grid, self.stages, self.dtype)
        self.optimizer = adam(self.replicas.owned, self.learning_rate)
        fp16 = scenario.training.precision == "fp16"
        self.scale = LossScale(FIRST_SCALE if fp16 else 1.0, moves=fp16)
        self._done: list[Done] = []
        self._losses: list[torch.Tensor] = []
        self._pipeline: _PipelineScheduleRuntime | None = None
        if scenario.layout.virtual_stages > 1:
            self._pipeline = build_pipeline(
                scenario, grid, self.stages, self.replicas, self._done, self._loss_behind, self.dtype
            )
        here = positions(scenario.layout, scenario.training.seq_len, grid["cp"].rank, torch.device("cpu"))
        self._here = here.numpy()

    @property
    def rows(self) -> tuple[int, int]:
        """First sequence of the global batch that this rank trains on, and how many."""
        each = self.scenario.training.global_batch // self.scenario.dp
        return self.grid.place.dp * each, each

    def passes(self, batch: np.ndarray, *, stop: bool = False) -> tuple[float, bool]:
        """Forward and backward of this rank's sequences.

        Args:
            batch: (sequences of this replica, seq_len + 1) token numbers.
            stop: Whether this rank was asked to stop.

        Returns:
            The mean loss of the global batch, and whether any rank was asked to stop.
        """
        device = self.grid.device
        tokens = torch.from_numpy(batch[:, :-1][:, self._here].copy()).to(device)
        targets = torch.from_numpy(batch[:, 1:][:, self._here].copy()).to(device)
        self._losses.clear()
        if self._pipeline is None:
            self._without_pipeline(tokens, targets)
        else:
            first, last = self.stages[0].is_first, any(stage.is_last for stage in self.stages)
            arguments = (tokens,) if first else ()
            self._pipeline.step(*arguments, target=targets if last else None, return_outputs=False)
        return self._told(stop)

    def _without_pipeline(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        (stage,) = self.stages
        clock, size, count = self.grid.log.clock, self.scenario.layout.micro_batch, self.scenario.micro_batches
        run = self.replicas.run(stage)
        for number, (x, y) in enumerate(zip(tokens.split(size), targets.split(size), strict=True)):
            with self.replicas.micro_batch(last=number == count - 1):
                began = clock.stamp()
                loss = self._loss(run(x), y)
                between = clock.stamp()
                loss.backward()
                self.replicas.after_backward(stage)
                ended = clock.stamp()
            self._done.append(Done("F", 0, number, began, between))
            self._done.append(Done("B", 0, number, between, ended))

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the mean loss of the global batch, times the loss scale."""
        mean = cross_entropy(logits, targets, self.grid, self.scenario.model.vocab).mean()
        self._losses.append(mean.detach())
        parts = self.scenario.micro_batches * self.scenario.dp * self.scenario.layout.cp
        return mean * (self.scale.scale / parts)

    def _loss_behind(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The same in a pipeline, where torch makes it behind the last stage's forward: it is a part of that pass."""
        loss = self._loss(logits, targets)
        self._done[-1].ended = self.grid.log.clock.stamp()
        return loss

    def _told(self, stop: bool) -> tuple[float, bool]:
        """What every rank is to know: stages before the last have no loss, and a request to stop may come to one."""
        mine = sum(self._losses, torch.zeros((), device=self.grid.device)).double()
        asked = torch.full_like(mine, float(stop))
        losses, asks = self.grid["world"].all_reduce(torch.stack([mine, asked])).tolist()
        parts = self.scenario.micro_batches * self.scenario.dp * self.scenario.layout.cp * self.grid.tp.size
        return losses / parts, asks > 0

    def step(self, number: int, batch: np.ndarray, *, stop: bool = False) -> StepRecord:
        """One step of training.

        Args:
            number: Of the step.
            batch: (sequences of this replica, seq_len + 1) token numbers.
            stop: Whether this rank was asked to stop.
        """
        clock, scale = self.grid.log.clock, self.scale.scale
        self.replicas.begin()
        began = clock.stamp()
        loss, stopped = self.passes(batch, stop=stop)
        passed = clock.stamp()
        alone = self.replicas.squared_norm_alone(self.grid["world"])
        self.replicas.reduce()
        reduced = clock.stamp()
        norm = update(
            self.replicas.owned,
            self.optimizer,
            self.grid["world"],
            self.scale,
            clip=self.scenario.training.gradient_clipping,
        )
        updated = clock.stamp()
        self.replicas.publish()
        ended = clock.stamp()
        clock.settle()
        done, self._done[:] = tuple(self._done), []
        calls, second_runs = self.grid.log.take()
        skipped = self.scale.moves and not np.isfinite(norm)
        # One replica's gradients lack the division by the replicas that the loss has for all.
        noise = None if alone is None or skipped else (alone * self.scenario.dp**2 / scale**2, norm**2)
        return StepRecord(
            number,
            loss,
            norm,
            skipped,
            began,
            passed,
            reduced,
            updated,
            ended,
            done,
            tuple(calls),
            tuple(second_runs),
            noise,
            stopped,
        )


def build_stages(build: Build, numbers: Sequence[int]) -> list[Stage]:
    """The virtual stages of a rank; the last shares a tied embedding with the first where both are here."""
    stages: list[Stage] = []
    embedding: Embedding | None = None
    for number in numbers:
        stage = Stage(build, number, embedding)
        embedding = embedding or stage.embedding
        stages.append(stage)
    return stages
