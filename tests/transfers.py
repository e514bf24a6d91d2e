"""Transfers played on the network, for tests of it."""

import simpy

from exatwin.sim.network import Network


def ends_in_ours(classes, flows):
    """Ends of transfers ``(seconds, class, bytes)``, and the network that shared the links."""
    env = simpy.Environment()
    network = Network(env, classes)
    ended = [0.0] * len(flows)

    def transfer(number, start, kind, size):
        yield env.timeout(start)
        yield network.start(kind, size)
        ended[number] = env.now

    for number, flow in enumerate(flows):
        env.process(transfer(number, *flow))
    env.run()
    return ended, network
