"""Seconds of lists of ops: the device's own work, and collectives of each kind of group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..scenarios.layout import Layout
from ..scenarios.scenario import Scenario
from ..topology.placement import Placement
from .calibration import Calibration
from .compute import DeviceRates, op_s
from .group_collectives import GroupCollectives
from .ops import Beside, Collective, Elementwise, Op, RingAttention
from .overlap import Both, beside, ring_backward, ring_forward
from .passes import CommUse, PassCost, merged


def collectives_of(scenario: Scenario, calibration: Calibration, placement: Placement) -> dict[str, GroupCollectives]:
    """The kinds of groups within a replica or across replicas that passes talk in; those of one rank are left out."""
    layout = scenario.layout
    etp = layout.etp or layout.tp
    groups = {}
    if layout.tp > 1:
        groups["tp"] = placement.tensor_groups()
    if layout.cp > 1:
        groups["cp"] = placement.replica_groups(layout.cp)
    if layout.ep > 1:
        groups["ep"] = placement.expert_groups(layout.ep, etp)
    if 1 < etp < layout.tp:
        groups["etp"] = placement.expert_tensor_groups(etp)
    figures = calibration.network
    return {kind: GroupCollectives(scenario, figures, kind, placement, rows) for kind, rows in groups.items()}


class Pricer:
    """Prices ops on one device of a job.

    Args:
        rates: What the device achieves.
        groups: Collectives by kind of group; a kind left out has one rank, and takes nothing.
        slowdown: How much longer work takes beside communication.
        dispatch_s: What the host takes to hand over one kernel or collective.
        expert_pass_s: What it takes for a pass of a layer with experts.
        layout: What is recorded and handed over as one, and whether experts' collectives run beside other passes.
    """

    def __init__(
        self,
        rates: DeviceRates,
        groups: dict[str, GroupCollectives],
        slowdown: float = 1.0,
        dispatch_s: float = 0.0,
        expert_pass_s: float = 0.0,
        layout: Layout | None = None,
    ) -> None:
        self.rates = rates
        self.expert_pass_s = expert_pass_s
        self.layout = layout or Layout()
        self.dispatch_s = dispatch_s
        self.groups = groups
        self.slowdown = slowdown

    def price(self, ops: Iterable[Op], *, recompute: bool = False) -> PassCost:
        """Seconds of a list of ops run one after another.

        Args:
            ops: In their order.
            recompute: The device's work counts as done a second time.
        """
        work_s = 0.0
        ops = list(ops)
        kernels = sum(map(self._kernels, ops))
        handed = sum(self._kernels(op) for op in ops if self._is_handed(op))
        uses: list[CommUse] = []
        for op in ops:
            if isinstance(op, Collective):
                uses += self._use(op.group, op.op, self._sent(op))
            elif isinstance(op, Beside):
                alone_s = sum(op_s(part, self.rates) for part in op.work)
                for use in (found := self._use(op.collective.group, op.collective.op, op.collective.bytes)):
                    both = beside(alone_s, use.busy_s, self.slowdown, op.pieces)
                    work_s += both.work_s
                    uses.append(_shown(use, both.exposed_s))
                work_s += 0.0 if found else alone_s
            elif isinstance(op, RingAttention):
                both, ring = self._ring(op)
                work_s += both.work_s
                uses += ring
            else:
                work_s += op_s(op, self.rates)
        expert_pass_s = self.expert_pass_s if any(map(_sends_tokens, ops)) else 0.0
        if self.layout.overlap_experts:
            work_s, uses = self._beside_another(work_s, uses)
        exposed: defaultdict[str, float] = defaultdict(float)
        for use in uses:
            exposed[use.group] += use.exposed_s
        return PassCost(
            compute_s=0.0 if recompute else work_s,
            recompute_s=work_s if recompute else 0.0,
            tp_comm_s=exposed["tp"] + exposed["etp"],
            cp_comm_s=exposed["cp"],
            ep_comm_s=exposed["ep"],
            host_s=max(handed * self.dispatch_s, expert_pass_s * handed / kernels if kernels else 0.0),
            uses=merged(uses),
        )

    def _kernels(self, op: Op) -> int:
        """Kernels and collectives that the host hands over for an op."""
        if isinstance(op, Elementwise):
            return op.kernels
        if isinstance(op, Collective):
            return int(op.group in self.groups)
        if isinstance(op, Beside):
            return sum(self._kernels(part) for part in (op.collective, *op.work))
        return 2 * op.steps if isinstance(op, RingAttention) else 1

    def _is_handed(self, op: Op) -> bool:
        """Whether the host hands an op over by itself, not within a recorded graph."""
        graphs = self.layout.graphs
        return graphs == "none" or (graphs == "blocks" and _of_experts(op))

    def _sent(self, op: Collective) -> float:
        """Bytes of a collective's buffer, less what goes only once."""
        if not op.draws or op.group not in self.groups:
            return op.bytes
        return op.bytes * self.groups[op.group].share_once(op.draws)

    def _beside_another(self, work_s: float, uses: list[CommUse]) -> tuple[float, list[CommUse]]:
        """A pass whose tokens go to experts and back beside the work of another micro-batch's pass, and the other way.

        Passes of both directions alternate, so that what a pass covers of another's is about what it has itself.

        Source: Megatron-LM, megatron/core/models/common/model_chunk_schedule_plan.py.
        """
        comm_s = sum(use.exposed_s for use in uses if use.group == "ep")
        if not comm_s:
            return work_s, uses
        both = beside(work_s, comm_s, self.slowdown)
        left = both.exposed_s / comm_s
        return both.work_s, [_shown(use, left * use.exposed_s) if use.group == "ep" else use for use in uses]

    def _use(self, group: str, op: str, size_bytes: float) -> list[CommUse]:
        """One call that nothing covers; none where the group is one rank."""
        if group not in self.groups:
            return []
        seconds, sent = self.groups[group].seconds(op, size_bytes)
        return [CommUse(group, op, sent, 1, seconds, seconds)]

    def _ring(self, op: RingAttention) -> tuple[Both, list[CommUse]]:
        ring = self.groups["cp"]
        block_s, (hop_s, _) = op_s(op.block, self.rates), ring.seconds("sendrecv", op.hop_bytes)
        sent, busy, count = (op.steps - 1) * op.hop_bytes, (op.steps - 1) * hop_s, op.steps - 1
        if op.backward:
            double_s, _ = ring.seconds("sendrecv", 2 * op.hop_bytes)
            both = ring_backward(block_s, hop_s, double_s, op.steps, self.slowdown)
            sent *= 2
            busy, count = (op.steps - 2) * double_s + 2 * hop_s, op.steps
        else:
            both = ring_forward(block_s, hop_s, op.steps, self.slowdown)
        return both, [CommUse("cp", "sendrecv", sent, count, busy, both.exposed_s)]


def _sends_tokens(op: Op) -> bool:
    return isinstance(op, Collective) and op.group == "ep" and op.op == "all_to_all"


def _of_experts(op: Op) -> bool:
    """What no graph of a layer's blocks holds: its kernels depend on how many tokens each expert gets.

    Source: Megatron-LM, megatron/core/transformer/moe/README.md, CUDA graphs: --cuda-graph-scope attn moe_router
    moe_preprocess.
    """
    name = op.collective.name if isinstance(op, Beside) else op.name
    return name.startswith(("permute", "unpermute", "expert_", "combine")) or name in ("dispatch", "dispatch_grad")


def _shown(use: CommUse, exposed_s: float) -> CommUse:
    return CommUse(use.group, use.op, use.bytes, use.count, use.busy_s, exposed_s)
