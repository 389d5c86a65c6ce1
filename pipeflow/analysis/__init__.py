"""Pure functions of plans: verify, simulate, lower, graph, partition, search. Standard library and networkx only, but
for exact, which asks OR-tools.
"""
