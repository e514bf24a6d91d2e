"""How it is cut: the parallel degrees, and what is recomputed where."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, WithJsonSchema, field_validator

from ..topology.errors import input_error, nearest, nearest_numbers
from .fields import Count, Flag, Natural, Recompute, Text
from .model import divisors
from .schedules import SCHEDULES, is_file, load_schedule

_RECOMPUTE: tuple[str, ...] = get_args(Recompute)


def _recompute(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return _recompute_word(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be {', '.join(_RECOMPUTE)}, or a list of those, one a stage")
    if not value:
        raise ValueError("is an empty list; it needs one entry a stage")
    return tuple(_recompute_word(entry) for entry in value)


def _recompute_word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be one of {', '.join(_RECOMPUTE)} for each stage, not a {type(value).__name__}")
    if value not in _RECOMPUTE:
        raise ValueError(f"unknown kind {value[:40]!r}{nearest(value[:40], _RECOMPUTE)}")
    return value


RecomputeField = Annotated[
    Recompute | tuple[Recompute, ...],
    PlainValidator(_recompute),
    PlainSerializer(lambda value: value if isinstance(value, str) else list(value), when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(_RECOMPUTE), "type": "string"},
                {"items": {"enum": list(_RECOMPUTE), "type": "string"}, "minItems": 1, "type": "array"},
            ],
            "description": "activations computed again in the backward pass, for all stages or one entry a stage",
        }
    ),
]


class Layout(BaseModel):
    """Parallel degrees of a run: devices = tp x pp x cp x dp."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: Count = Field(default=1, description="tensor-parallel degree")
    pp: Count = Field(default=1, description="pipeline stages")
    dp: Count | None = Field(default=None, description="replicas; left out: devices / (tp x pp x cp)")
    vpp: Count = Field(default=1, description="virtual stages a pipeline rank")
    cp: Count = Field(default=1, description="context-parallel degree")
    cp_attention: Literal["ring", "all_gather", "all_to_all"] = Field(
        default="ring", description="how the context-parallel ranks come by keys and values, or by whole heads"
    )
    ep: Count = Field(default=1, description="expert-parallel degree; its groups lie within the dp x cp replicas")
    etp: Count | None = Field(default=None, description="tensor-parallel degree of the experts; left out: tp")
    micro_batch: Count = Field(default=1, description="sequences in one micro-batch of one replica")
    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = Field(default=0, description="ZeRO stage")
    shard_group: Count | None = Field(
        default=None, description="replicas that share one copy of what ZeRO shards (hybrid shard); left out: all"
    )
    secondary_shards: Count | None = Field(
        default=None,
        description="ZeRO-3: ranks that share a second copy of the weights for the backward; left out: none",
    )
    reshard_after_forward: Flag = Field(default=True, description="ZeRO-3: weights are given up between the passes")
    prefetch: Natural = Field(default=1, description="ZeRO-3: layers that are gathered ahead of the one at work")
    overlap_grad_reduce: Flag = Field(
        default=False, description="gradients are reduced while the last backward runs, layer by layer"
    )
    overlap_param_gather: Flag = Field(
        default=False, description="ZeRO-1 and 2 gather the new weights while the next forward runs"
    )
    overlap_tensor: Flag = Field(
        default=False,
        description="with sequence parallelism: tokens are gathered and sums scattered beside their products",
    )
    expert_dispatch: Literal["copies", "once"] = Field(
        default="copies",
        description="how tokens reach experts: a copy for each, or once to each rank, and once to each node "
        "beyond one's own, as DeepEP and HybridEP send them",
    )
    overlap_experts: Flag = Field(
        default=False, description="tokens go to experts and back beside the pass of another micro-batch"
    )
    fused_experts: Flag = Field(
        default=False, description="the experts' grouped products do the activation and the casts to fp8 between them"
    )
    graphs: Literal["none", "blocks", "step"] = Field(
        default="none",
        description="what is recorded once and handed over as one (CUDA graphs): nothing, each layer up to its "
        "experts, or the whole step",
    )
    offload_optimizer: Flag = Field(default=False, description="optimizer state and its work on the host")
    schedule: Text = Field(
        default="1f1b",
        description="pipeline schedule, or the path of a CSV table",
        json_schema_extra={"anyOf": [{"enum": list(SCHEDULES)}, {"pattern": r"\.[cC][sS][vV]$"}]},
    )
    sequence_parallel: Flag = False
    recompute: RecomputeField = "none"
    recompute_ops: tuple[Literal["attention", "norm", "activation", "experts"], ...] = Field(
        default=("attention",), description="what selective recomputation runs again"
    )
    recompute_layers: Count | None = Field(
        default=None, description="so many first layers of each virtual stage are recomputed; left out: all"
    )
    recompute_every: Count = Field(default=1, description="of those layers one in so many, beginning with the first")
    flash_attention: Flag = Field(default=True, description="attention that never writes its weights to memory")
    stage_layers: tuple[Count, ...] | None = Field(
        default=None, description="layers of each stage where uneven, in the order of the model: pp x vpp entries"
    )

    @field_validator("schedule")
    @classmethod
    def _schedule_is_known(cls, value: str) -> str:
        if value not in SCHEDULES and not is_file(value):
            raise ValueError(f"unknown schedule {value[:40]!r}{nearest(value[:40], SCHEDULES)}; or give a .csv file")
        return value

    @field_validator("stage_layers", mode="before")
    @classmethod
    def _stage_layers_are_a_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, (list, tuple)):
            raise ValueError("must be a list of whole numbers, the layers of each stage")
        return value

    @property
    def model_parallel(self) -> int:
        """Devices that hold one replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def virtual_stages(self) -> int:
        """Stages of the pipeline, each a slice of the layers: pp x vpp."""
        return self.pp * self.vpp

    def layers_by_virtual_stage(self, layers: int) -> tuple[int, ...]:
        """Layers of each virtual stage, in the order of the model.

        >>> Layout(pp=2, vpp=2).layers_by_virtual_stage(48)
        (12, 12, 12, 12)

        Raises:
            InputError: If the stages cannot share them evenly and ``stage_layers`` does not say how.
        """
        if self.stage_layers is not None:
            return self.stage_layers
        if layers % self.virtual_stages:
            across, choices = even_choices(self, layers)
            raise input_error(f"{across} does not divide {layers} layers; pp can be {choices}", field="layout.pp")
        return (layers // self.virtual_stages,) * self.virtual_stages

    def layers_by_stage(self, layers: int) -> tuple[int, ...]:
        """Layers of each pipeline rank, all its virtual stages together.

        >>> Layout(pp=4).layers_by_stage(48)
        (12, 12, 12, 12)
        >>> Layout(pp=2, vpp=2, schedule="zb-v", stage_layers=(1, 2, 3, 4)).layers_by_stage(10)
        (5, 5)

        Raises:
            InputError: As `layers_by_virtual_stage`.
        """
        each = self.layers_by_virtual_stage(layers)
        if self.vpp == 1:
            return each
        schedule = load_schedule(self.schedule)
        stages = [[schedule.stage_of(rank, chunk, self.pp) for chunk in range(self.vpp)] for rank in range(self.pp)]
        return tuple(sum(each[stage] for stage in mine) for mine in stages)

    def recomputed_layers(self, layers: int) -> tuple[bool, ...]:
        """Which layers of a virtual stage of so many are recomputed, where its stage recomputes at all.

        >>> Layout(recompute="full", recompute_layers=3, recompute_every=2).recomputed_layers(5)
        (True, False, True, False, False)
        """
        most = layers if self.recompute_layers is None else self.recompute_layers
        return tuple(number < most and number % self.recompute_every == 0 for number in range(layers))

    def recompute_by_stage(self) -> tuple[Recompute, ...]:
        """What each stage recomputes.

        >>> Layout(pp=2, recompute=["full", "none"]).recompute_by_stage()
        ('full', 'none')
        """
        if isinstance(self.recompute, tuple):
            return self.recompute
        return (self.recompute,) * self.pp


def even_choices(layout: Layout, layers: int) -> tuple[str, str]:
    """The degrees that cut the layers into stages, in words, and the ``pp`` that would cut them evenly.

    >>> even_choices(Layout(pp=3, vpp=2), 8)
    ('pp x vpp = 3 x 2 = 6', '1, 2, 4')
    """
    pp, vpp = layout.pp, layout.vpp
    across = f"pp={pp}" if vpp == 1 else f"pp x vpp = {pp} x {vpp} = {pp * vpp}"
    valid = [n // vpp for n in divisors(layers) if n % vpp == 0]
    none = f"no number with vpp={vpp} (vpp can be {nearest_numbers(vpp, divisors(layers), most=6)})"
    return across, nearest_numbers(pp, valid) or none
