"""Pure functions of plans: verify, simulate, lower, graph, partition. Standard library and networkx only."""
