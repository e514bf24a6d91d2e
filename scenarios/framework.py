"""What a training framework keeps and sends: bytes a parameter, and how gradients travel.

Frameworks differ where people are surprised: one keeps gradients twice, another
sends them in 2 bytes, a third splits pipeline messages over the tensor-parallel
ranks, a fourth reduces them for each micro-batch. Each is a file of facts; copy one to describe your own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..topology.errors import input_error
from ..topology.files import build
from .fields import BytesEach, BytesMoved, Flag, Precision, Text
from .memory_habits import MemoryHabits
from .reading import bundled, read

KvHeadsRule = Literal["divides", "multiple_or_divisor"]
ZeroStages = tuple[Literal[0, 1, 2, 3], ...]


def _with_fp8(value: Any) -> Any:
    """Figures by precision; those of fp8 are those of bf16 where not said, for only matrix products differ."""
    if isinstance(value, dict) and "bf16" in value and "fp8" not in value:
        return value | {"fp8": value["bf16"]}
    return value


class StateBytes(BaseModel):
    """Bytes a parameter, before any sharding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: BytesEach = Field(description="the weight that the layers compute with, where it stays between passes")
    gradient: BytesEach = Field(description="the gradient that backward writes")
    accumulation: BytesEach = Field(description="a second gradient, where micro-batches add up; or 0")
    optimizer: BytesEach = Field(description="master weight and Adam's two moments: what ZeRO-1 shards")

    @property
    def total(self) -> float:
        """All of them, with nothing sharded."""
        return self.weight + self.gradient + self.accumulation + self.optimizer


BytesByPrecision = Annotated[dict[Precision, BytesEach], BeforeValidator(_with_fp8)]


class Reduce(BaseModel):
    """How the data-parallel gradients travel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collective: Literal["all_reduce", "reduce_scatter"] = Field(
        description="how ZeRO-1 and 2 sum; without ZeRO it is an all-reduce, with ZeRO-3 a reduce-scatter"
    )
    bytes: BytesByPrecision = Field(description="bytes an element on the wire")
    as_accumulated: Flag = Field(
        default=False, description="gradients travel in what training.accumulate_fp32 says, where it says something"
    )
    each_micro_batch: ZeroStages = Field(
        default=(2, 3), description="ZeRO stages at which each micro-batch's gradients are reduced by themselves"
    )
    each_in_pipeline: Flag = Field(
        default=False, description="those stages do so between pipeline stages too; else once, after the last"
    )
    overlapped: ZeroStages = Field(
        default=(3,), description="ZeRO stages that reduce beside the backward whatever layout.overlap_grad_reduce says"
    )

    def in_pass(self, zero: int, pp: int) -> bool:
        """Whether each micro-batch's backward reduces its gradients; else they are reduced once a step."""
        return zero > 0 and zero in self.each_micro_batch and (pp == 1 or self.each_in_pipeline)


class Sharding(BaseModel):
    """What ZeRO stages a framework has, and when it gathers the weights that they shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stages: ZeroStages = Field(default=(0, 1), min_length=1, description="ZeRO stages that it has")
    pipeline_stages: ZeroStages = Field(default=(0, 1), min_length=1, description="those it has with pp > 1")
    gather_in_pass: ZeroStages = Field(
        default=(3,), description="ZeRO stages at which each forward gathers its weights; others gather once a step"
    )
    gather_bytes: BytesByPrecision | None = Field(
        default=None, description="bytes a gathered weight; left out: as the layers compute"
    )
    copies_out: Flag = Field(
        default=False, description="gathered weights are copied once more before layers use them, as FSDP2 does"
    )
    flat: Flag = Field(
        default=False,
        description="the weights of a unit are views of one tensor, as in FSDP1: its gradient is put together from "
        "theirs, cast and divided before it is reduced",
    )
    keeps_last: Flag = Field(
        default=True, description="the last unit of a forward stays gathered for the backward that follows at once"
    )

    def by_unit(self, zero: int) -> bool:
        """Whether weights are made whole, and gradients reduced, one unit of the model at a time."""
        return zero == 3 or zero in self.gather_in_pass


class Pipeline(BaseModel):
    """How activations travel between stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    send_blocks: Flag = Field(description="the sender waits until its message is out")
    chunks_overlap: Flag = Field(
        default=False, description="with several chunks a rank, a message is out while the rank works on the next one"
    )
    partition_over_tp: Flag = Field(description="each tensor-parallel rank sends its part, and the receivers gather")


class Framework(BaseModel):
    """One training framework, as its users run it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text
    title: Text | None = None
    source: Text
    note: Text | None = None
    states: Annotated[dict[Precision, StateBytes], BeforeValidator(_with_fp8)] = Field(
        min_length=1, description="bytes a parameter, by precision; fp8 left out: as bf16"
    )
    unit_states: Annotated[dict[Precision, StateBytes], BeforeValidator(_with_fp8)] | None = Field(
        default=None,
        description="the same where ZeRO shards weights unit by unit (sharding.gather_in_pass, and stage 3); "
        "left out, all or a precision: as states",
    )
    reduce: Reduce
    sharding: Sharding = Field(default_factory=Sharding, description="its ZeRO stages")
    tied_reduce_bytes: BytesByPrecision = Field(description="bytes an element of the tied gradient")
    tied_copy: Literal["words", "embedding"] = Field(
        default="words",
        description="what the last stage copies where the head is tied: the words, or the whole embedding",
    )
    pipeline: Pipeline
    update_bytes: BytesMoved | None = Field(
        default=None,
        description="bytes a parameter that the optimizer moves; left out: one kernel, which reads gradient, master "
        "weight and two moments and writes the last three and the weight",
    )
    memory: MemoryHabits = Field(default_factory=MemoryHabits, description="what its kernels keep")
    kv_heads: KvHeadsRule = Field(description="tp must divide the kv heads, or may also be a multiple of them")
    overlap_tensor_grads: Flag = Field(
        default=False,
        description="in the backward of a column-parallel weight, collectives run beside the products",
    )

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that it is described for."""
        return tuple(p for p in self.states if p in self.reduce.bytes and p in self.tied_reduce_bytes)

    def state_bytes(self, precision: Precision, zero: int = 0) -> StateBytes:
        """Bytes a parameter in a precision, before sharding.

        Args:
            precision: What the layers compute in.
            zero: The ZeRO stage, for a framework whose weights that are sharded unit by unit are kept another way.

        >>> load_framework("exatwin").state_bytes("bf16", zero=3).weight
        0.0

        Raises:
            InputError: If the framework is not described for it.
        """
        if precision not in self.precisions:
            raise input_error(f"is not described for {precision}; it has {', '.join(self.precisions)}", where=self.name)
        if self.unit_states and self.sharding.by_unit(zero) and precision in self.unit_states:
            return self.unit_states[precision]
        return self.states[precision]


def framework_names() -> list[str]:
    """The bundled frameworks."""
    return bundled("frameworks")


def load_framework(name_or_path: str) -> Framework:
    """A bundled framework, or one from a file.

    >>> load_framework("megatron-deepspeed").state_bytes("bf16").total
    20.0

    Raises:
        InputError: If there is no such framework or its file is wrong.
    """
    document, where = read(name_or_path, "frameworks", "framework")
    return build(Framework, document, where)
