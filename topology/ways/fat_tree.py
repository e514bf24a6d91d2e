"""Ways through a fat tree: up as far as needed, and down; traffic spreads over all links of a level alike."""

from __future__ import annotations

import numpy as np

from ..errors import nearest_numbers
from ..fabrics import FatTree
from ..faults import Fault
from ..hops import Floats, Hops, Ints, Lanes, hops, join
from .ways import Ways, no_such_link


class FatTreeWays(Ways):
    """Links: up from and down to each leaf (set by set, rail by rail), then each plane of each pod's spines."""

    @property
    def _fabric(self) -> FatTree:
        fabric = self.machine.fabric
        assert isinstance(fabric, FatTree)
        return fabric

    def bandwidths(self) -> Floats:
        """Bytes/s of each pool, by oversubscription."""
        fabric, nodes, nics = self._fabric, self.machine.node_count, self.machine.node.nic_count
        self.rails, self.planes, self.levels = fabric.rails.value, fabric.planes, fabric.levels.value
        self.sets, self.pod_sets = fabric.sets(nodes), fabric.pod_sets(nodes)
        self.set = fabric.groups_of(self.node_ids)
        self.rail = np.arange(nics, dtype=np.int64) * self.rails // nics
        self.pods = -(-self.sets // self.pod_sets)
        leaves = np.full(2 * self.sets * self.rails, fabric.leaf_bytes_per_s(nics))
        spines = np.full(2 * self.pods * self.planes, fabric.spine_bytes_per_s(nodes, nics))
        return np.concatenate([leaves, spines])

    def find(self, fault: Fault) -> Ints:
        """Both ways of a leaf's links to its spines, or of a pod's to the cores."""
        asked = f"it is ('leaf:SET:RAIL', 'spine') with sets 0 to {self.sets - 1} and rails 0 to {self.rails - 1}" + (
            f", or ('spine:POD:PLANE', 'core') with pods 0 to {self.pods - 1}" if self.levels == 3 else ""
        )
        lower, upper = (str(end) for end in fault.ends or ("", ""))
        try:
            kind, first, second = lower.split(":")
            a, b = int(first), int(second)
        except ValueError:
            raise no_such_link(fault, asked) from None
        if kind == "leaf" and upper.startswith("spine") and 0 <= a < self.sets and 0 <= b < self.rails:
            link = 2 * (a * self.rails + b)
        elif kind == "spine" and upper == "core" and self.levels == 3 and 0 <= a < self.pods and 0 <= b < self.planes:
            link = 2 * (self.sets * self.rails + a * self.planes + b)
        else:
            near = nearest_numbers(a, range(self.sets if kind == "leaf" else self.pods), 3)
            raise no_such_link(fault, f"{asked}; nearest to {a}: {near}")
        return np.array([link, link + 1])

    def cross(self, messages: Ints, source: Ints, target: Ints, lanes: Lanes, together: Ints, floor_s: Floats) -> Hops:
        """Each lane up from its leaf and down to the other's, and by the cores where no spine joins the two."""
        out_set, in_set = self.set[source[lanes.message]], self.set[target[lanes.message]]
        out_rail, in_rail = self.rail[lanes.out_nic], self.rail[lanes.in_nic]
        leaf, other = out_set * self.rails + out_rail, in_set * self.rails + in_rail
        apart = leaf != other
        message, share = lanes.message[apart], lanes.share[apart]
        parts = [hops(message, 2 * leaf[apart], share), hops(message, 2 * other[apart] + 1, share)]
        if self.levels == 3:
            base = 2 * self.sets * self.rails
            spine = out_set // self.pod_sets * self.planes + out_rail * (self.planes > 1)
            above = in_set // self.pod_sets * self.planes + in_rail * (self.planes > 1)
            apart = spine != above
            message, share = lanes.message[apart], lanes.share[apart]
            parts += [hops(message, base + 2 * spine[apart], share), hops(message, base + 2 * above[apart] + 1, share)]
        return self.refuse_failed(join(parts))

    def distance(self, source: Ints, target: Ints, out_nic: Ints, in_nic: Ints) -> Ints:
        """0 below one leaf, 2 by a spine, 4 by a core."""
        a, b, r, t = self.set[source], self.set[target], self.rail[out_nic], self.rail[in_nic]
        apart = (a != b) | (r != t)
        high = (a // self.pod_sets != b // self.pod_sets) | ((r != t) & (self.planes > 1))
        return np.where(source == target, 0, 2 * apart + 2 * (high & (self.levels == 3) & apart))

    def name(self, link: int) -> str:
        """Such as ``leaf 3 rail 0 up``."""
        number, down = divmod(link, 2)
        way = "down" if down else "up"
        if number < self.sets * self.rails:
            leaf, rail = divmod(number, self.rails)
            return f"leaf {leaf} rail {rail} {way}" if self.rails > 1 else f"leaf {leaf} {way}"
        pod, plane = divmod(number - self.sets * self.rails, self.planes)
        where = [f"pod {pod}"] * (self.pods > 1) + [f"rail {plane}"] * (self.planes > 1)
        return " ".join(["spines", *where, way])
