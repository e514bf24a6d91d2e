"""How it is trained: batch, sequence, numbers, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .fields import Count, Extent, Factor, Flag, Precision, Probability, Text, Tokens


class Training(BaseModel):
    """One training run; the batch counts sequences, of all data-parallel replicas together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq_len: Extent = Field(description="tokens in a sequence")
    global_batch: Count = Field(description="sequences in a step, over all replicas")
    precision: Precision = Field(
        description="of weights and activations in the matrix products; fp8: those in fp8, all else in bf16"
    )
    optimizer: Literal["adam"] = "adam"
    gradient_clipping: Flag = Field(default=True, description="gradients are scaled by their global norm")
    tokens: Tokens | None = None
    attention_dropout: Probability = Field(default=0.0, description="on the attention weights; its mask takes memory")
    hidden_dropout: Probability = Field(default=0.0, description="after attention and MLP; its masks take memory")
    accumulate_fp32: Flag | None = Field(
        default=None, description="micro-batches add up their gradients in fp32; left out: as the framework does"
    )
    capacity_factor: Factor | None = Field(
        default=None, description="tokens an expert takes at most, over its even share; the rest are dropped"
    )
    expert_imbalance: Factor = Field(default=1.0, description="tokens of the busiest expert rank, over the mean")
    data: Text | None = Field(
        default=None,
        description="text or token file, or a folder of text, that the trainer reads; left out: the source of Python's "
        "standard library. The simulator ignores it",
    )
