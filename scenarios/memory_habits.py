"""What a framework's layers and optimizer keep beside the tensors that every framework keeps."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .fields import BytesEach, Flag, Precision


class MemoryHabits(BaseModel):
    """How a framework's kernels use memory; the defaults are those of Megatron's own layers of 2021.

    Source of the defaults: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1 (what a layer and the loss keep);
    NVIDIA Megatron-LM, core/tensor_parallel/cross_entropy.py (scores in fp32, their exponentials kept).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fused_loss: Flag = Field(
        default=False,
        description="the loss writes the gradient of the logits over them; false: it keeps them in fp32",
    )
    metric_losses: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="times that each micro-batch's loss is worked out once more, in fp32, to be logged"
    )
    fused_softmax: Flag = Field(
        default=True,
        description="scale, mask and softmax of the scores in one kernel; false: in kernels of their own, in fp32",
    )
    eager_rotary: tuple[Precision, ...] = Field(
        default=(), description="precisions in which rotary positions are turned by one kernel for each step of theirs"
    )
    partition_checkpoints: Flag = Field(
        default=False,
        description="with tp, each rank keeps its part of what a recomputed layer starts from, and gathers it again",
    )
    fresh_gradients: Flag = Field(
        default=True, description="a matrix's gradient is made anew, then added up; false where the product adds it up"
    )
    dummy_gradients: Flag = Field(
        default=False,
        description="one unused gradient stays for every shape of matrix, as Transformer Engine keeps for autograd",
    )
    unfused_gate: Flag = Field(default=False, description="a gated MLP keeps its activated gate beside both factors")
    gather_buffer: Flag = Field(
        default=False, description="sequence parallelism gathers into one buffer that stays from step to step"
    )
    optimizer_work: BytesEach = Field(
        default=0.0, description="bytes a parameter of this rank's share that only the optimizer's step takes"
    )
    gradients_freed: Flag = Field(
        default=False,
        description="gradients are given up after the step: with one micro-batch they come as the backward makes them",
    )
