"""Which device each rank runs on.

Ranks are numbered as Megatron-LM and DeepSpeed number them: tensor parallel
varies fastest, then data parallel, and the pipeline stage slowest. Ranks fill
the nodes of the job in order, rank ``i`` of a node on device ``i``.

Source of the rank order: Megatron-LM, megatron/core/parallel_state.py
(``initialize_model_parallel``, default order "tp-cp-ep-dp-pp"); DeepSpeed,
runtime/pipe/topology.py (``PipeModelDataParallelTopology``, axes pipe, data, model).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """The ranks of a job on its devices.

    Attributes:
        tp: Tensor-parallel degree.
        dp: Data-parallel degree.
        pp: Pipeline stages.
        devices_per_node: Devices of a node; a device's number is ``node * devices_per_node + local``.
    """

    tp: int
    dp: int
    pp: int
    devices_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of the job, one a device."""
        return self.tp * self.dp * self.pp

    @property
    def nodes(self) -> int:
        """Nodes of the job; the last may be partly used."""
        return -(-self.ranks // self.devices_per_node)

    def grid(self) -> Ranks:
        """Device of each rank, shape (pp, dp, tp).

        >>> Placement(tp=2, dp=3, pp=2, devices_per_node=8).grid()[1].tolist()
        [[6, 7], [8, 9], [10, 11]]
        """
        return np.arange(self.ranks, dtype=np.int64).reshape(self.pp, self.dp, self.tp)

    def tensor_groups(self) -> Ranks:
        """Devices of every tensor-parallel group, shape (groups, tp)."""
        return self.grid().reshape(-1, self.tp)

    def data_groups(self, stage: int) -> Ranks:
        """Devices of the data-parallel groups of a stage, shape (tp, dp)."""
        groups: Ranks = self.grid()[stage].T
        return groups

    def tensor_group_crosses_nodes(self) -> bool:
        """Whether some tensor-parallel group leaves its node."""
        nodes = self.tensor_groups() // self.devices_per_node
        return bool((nodes != nodes[:, :1]).any())
