"""Pure functions of one schedule or timeline: order, simulate, lower, causes, measures, difference, graph."""
