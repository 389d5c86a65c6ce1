"""Pure functions of a schedule or a timeline: order, simulate, lower, causes, measures, difference, graph."""
