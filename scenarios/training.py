"""How it is trained: batch, sequence, numbers, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .fields import Count, Extent, Flag, Precision, Probability, Tokens


class Training(BaseModel):
    """One training run; the batch counts sequences, of all data-parallel replicas together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq_len: Extent = Field(description="tokens in a sequence")
    global_batch: Count = Field(description="sequences in a step, over all replicas")
    precision: Precision = Field(description="of weights and activations in the matrix products")
    optimizer: Literal["adam"] = "adam"
    gradient_clipping: Flag = Field(default=True, description="gradients are scaled by their global norm")
    tokens: Tokens | None = None
    attention_dropout: Probability = Field(default=0.0, description="on the attention weights; its mask takes memory")
    hidden_dropout: Probability = Field(default=0.0, description="after attention and MLP; its masks take memory")
