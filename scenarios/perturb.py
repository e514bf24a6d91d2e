"""What is not as it should be: slow devices, degraded links, other jobs' traffic, jitter.

Every entry names what it touches; one that touches nothing of the job is an error,
not silence.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from ..topology.units import BytesPerSecond

_STRICT = ConfigDict(frozen=True, extra="forbid")

Number = Annotated[int, Field(strict=True, ge=0, le=10_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
End = Annotated[str, Field(min_length=1, max_length=80)]
Speed = Annotated[float, Field(gt=0, le=10)]


class SlowDevice(BaseModel):
    """A device, or all devices of a node, that computes at another speed than the rest."""

    model_config = _STRICT
    rank: Number | None = Field(default=None, description="global rank, tensor parallel fastest")
    node: Number | None = Field(default=None, description="node of the job, counted from 0")
    speed: Speed = Field(description="of the others' speed; 0.8 takes a quarter longer")


class NicFault(BaseModel):
    """A NIC of one of the job's nodes at a share of its rate."""

    model_config = _STRICT
    node: Number
    nic: str = Field(description="its name in the machine file")
    rate: Share = Field(description="of its bandwidth; 0 is a failed NIC, whose traffic the node's others take")


class LinkFault(BaseModel):
    """A link inside a node, or one of the fabric, at a share of its rate."""

    model_config = _STRICT
    node: Number | None = Field(default=None, description="node of the job; with between")
    between: tuple[Number | Literal["switch"], Number | Literal["switch"]] | None = Field(
        default=None, description="two devices of that node, or a device and its switch"
    )
    groups: tuple[Number, Number] | None = Field(default=None, description="two dragonfly groups of the machine")
    ends: tuple[End, End] | None = Field(
        default=None, description="of a link of another fabric: vertices as the machine's graph names them"
    )
    rate: Share


class Background(BaseModel):
    """A steady stream of another job from one node of the job's allocation to another, or between their groups."""

    model_config = _STRICT
    source: Number = Field(description="node of the job next to which it starts")
    target: Number = Field(description="node of the job next to which it ends")
    rate: BytesPerSecond

    @field_serializer("rate")
    def _with_unit(self, rate: float) -> str:
        return f"{rate!r} B/s"


class Jitter(BaseModel):
    """Random spread of every action's time, log-normal, independent for each replica, stage and micro-batch."""

    model_config = _STRICT
    spread: Annotated[float, Field(gt=0, le=2)] = Field(description="standard deviation over mean")
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0


class Perturbations(BaseModel):
    """All of them; none by default."""

    model_config = _STRICT
    devices: tuple[SlowDevice, ...] = ()
    nics: tuple[NicFault, ...] = ()
    links: tuple[LinkFault, ...] = ()
    background: tuple[Background, ...] = ()
    jitter: Jitter | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is perturbed."""
        return self == Perturbations()
