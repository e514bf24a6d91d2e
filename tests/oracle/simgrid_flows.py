"""Play flows in SimGrid: a program of its own, run by the system's Python, JSON in and JSON out.

In: ``links``, bytes/s of each, and ``flows``, each ``[seconds, bytes, [link, ...], [flow before, ...]]``: it starts
then, or once those before it have ended. Out: the second at which each ended. One engine a process, since
SimGrid allows no second.

SimGrid is plain max-min with its model CM02, without cross-traffic, without a TCP window, and without latency:
with latency it weighs flows by the round trip of their route.
"""

from __future__ import annotations

import heapq
import json
import sys

import simgrid

CONFIGURATION = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0")


def play(links: list[float], flows: list[list]) -> list[float]:
    """When each flow ends; every one has two hosts and a route of its own."""
    engine = simgrid.Engine(["flows", "--log=root.thresh:error", *(f"--cfg={item}" for item in CONFIGURATION)])
    zone = simgrid.NetZone.create_full_zone("all")
    joined = [zone.create_link(f"link {i}", capacity).set_latency(0).seal() for i, capacity in enumerate(links)]
    ends = []
    for number, (_, _, route, _) in enumerate(flows):
        pair = [zone.create_host(f"{end} {number}", 1.0) for end in ("source", "target")]
        way = [simgrid.LinkInRoute(joined[link]) for link in route]
        zone.add_route(pair[0].netpoint, pair[1].netpoint, None, None, way, False)
        ends.append(pair)
    zone.seal()
    ended = [0.0] * len(flows)
    simgrid.Actor.create("driver", ends[0][0], drive, flows, ends, ended)
    engine.run()
    return ended


def drive(flows: list[list], ends: list, ended: list[float]) -> None:
    """Start every flow in its time and note when it ends."""
    after: list[list[int]] = [[] for _ in flows]
    waits = [len(before) for *_, before in flows]
    for number, (*_, before) in enumerate(flows):
        for other in before:
            after[other].append(number)
    due = [(flow[0], number) for number, flow in enumerate(flows) if not waits[number]]
    heapq.heapify(due)
    under_way: list[int] = []
    transfers: list[simgrid.Comm] = []
    while due or under_way:
        now = simgrid.Engine.clock
        while due and due[0][0] <= now:
            number = heapq.heappop(due)[1]
            under_way.append(number)
            transfers.append(simgrid.Comm.sendto_async(*ends[number], round(flows[number][1])))
        if not under_way:
            simgrid.this_actor.sleep_until(due[0][0])
            continue
        until = due[0][0] - now if due else -1.0
        index = simgrid.Comm.wait_any_for(transfers, until)
        if index < 0:
            continue
        number = under_way.pop(index)
        transfers.pop(index)
        ended[number] = simgrid.Engine.clock
        for other in after[number]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(due, (max(flows[other][0], simgrid.Engine.clock), other))


if __name__ == "__main__":
    question = json.load(sys.stdin)
    answer = play(question["links"], question["flows"])
    sys.stdout.write("\n" + json.dumps(answer))
    sys.stdout.flush()
