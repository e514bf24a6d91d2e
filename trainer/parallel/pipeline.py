"""Pipeline parallelism: torch's runtime plays the very table that the simulation plays.

torch places the messages and gathers between the actions of the table; here are stages that log what they do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from ...scenarios.scenario import Scenario
from ...scenarios.schedules import schedule_table, to_csv
from ..grid import Grid
from ..model import Stage
from .replicas import Replicas


@dataclass
class Done:
    """An action that a rank has done: ``kind`` F, B, I or W, as in the table, and when, in points of the clock."""

    kind: str
    stage: int
    micro_batch: int
    began: Any
    ended: Any


class LoggedStage(PipelineStage):
    """A stage that notes what it does, and tells the modules which half of a backward runs."""

    def __init__(
        self,
        stage: Stage,
        scenario: Scenario,
        grid: Grid,
        replicas: Replicas,
        done: list[Done],
        sample: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(
            stage,
            stage.number,
            scenario.layout.virtual_stages,
            grid.device,
            input_args=sample[0],
            output_args=sample[1],
            group=grid.mesh.get_group("pp") if grid.mesh is not None else None,
        )
        self._grid, self._replicas, self._done, self._stage = grid, replicas, done, stage

    def _noted(self, kind: str, micro_batch: int, run: Callable[[], Any]) -> Any:
        clock = self._grid.log.clock
        began = clock.stamp()
        result = run()
        self._done.append(Done(kind, self.stage_index, micro_batch, began, clock.stamp()))
        return result

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """A forward."""
        forward = super().forward_one_chunk
        return self._noted("F", fwd_chunk_id, lambda: forward(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """A backward, or the half that makes the gradient of the input."""
        backward = super().backward_one_chunk

        def run() -> None:
            self._grid.phase.half = "both" if full_backward else "input"
            backward(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
            self._grid.phase.half = "both"
            self._replicas.after_backward(self._stage)

        self._noted("B" if full_backward else "I", bwd_chunk_id, run)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The half that makes the gradients of the weights; on the first stage torch leaves all of it to this one."""
        backward = super().backward_weight_one_chunk

        def run() -> None:
            self._grid.phase.half = "both" if self.stage_index == 0 else "weight"
            backward(bwd_chunk_id, last_backward=last_backward)
            self._grid.phase.half = "both"
            self._replicas.after_backward(self._stage)

        self._noted("W", bwd_chunk_id, run)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Activations to the next stage."""
        return self._sent(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradients to the stage before."""
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            # With sequence parallelism the sums come as a view across the micro-batch; messages are sent in one piece.
            op.tensor = op.tensor.contiguous()
            self._grid.log.sent("pp", "send", float(op.tensor.numel() * op.tensor.element_size()))
        return ops


def build_pipeline(
    scenario: Scenario,
    grid: Grid,
    stages: Sequence[Stage],
    replicas: Replicas,
    done: list[Done],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> _PipelineScheduleRuntime:
    """torch's runtime with the scenario's schedule.

    Args:
        scenario: What is trained.
        grid: The rank.
        stages: Its virtual stages.
        replicas: Told of each backward.
        done: Where actions are noted.
        loss: Of logits and targets of a micro-batch, divided so that gradients of all micro-batches sum up.
        dtype: Of the stream.
    """
    wrapped = [
        LoggedStage(stage, scenario, grid, replicas, done, _sample(scenario, grid, stage, dtype)) for stage in stages
    ]
    micro_batches = scenario.micro_batches
    runtime = _PipelineScheduleRuntime(list(wrapped), micro_batches, loss_fn=loss, scale_grads=False)
    table = schedule_table(scenario.schedule, scenario.layout.pp, micro_batches, scenario.layout.vpp)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(table), encoding="utf-8")
        runtime._load_csv(str(path), "compute_only")
    return runtime


def _sample(scenario: Scenario, grid: Grid, stage: Stage, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of what a stage takes and gives for one micro-batch, so that torch need not ask the stages."""
    layout, model = scenario.layout, scenario.model
    here = scenario.training.seq_len // layout.cp
    tokens = torch.empty((layout.micro_batch, here), dtype=torch.int64, device="meta")
    stream_tokens = here // (layout.tp if grid.sequence_parallel else 1)
    stream = torch.empty((layout.micro_batch, stream_tokens, model.hidden), dtype=dtype, device="meta")
    logits = torch.empty(
        (layout.micro_batch, here, model.padded_vocab(layout.tp) // layout.tp), dtype=dtype, device="meta"
    )
    takes = tokens if stage.is_first else stream.requires_grad_()
    gives = logits if stage.is_last else stream.clone()
    return takes, gives.requires_grad_()
