"""The simulated run: ops, costs, network and memory, played as events."""
