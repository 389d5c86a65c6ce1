"""The search for orders: pure functions. `search` finds a good one, `exact` proves the best one of a small case."""
