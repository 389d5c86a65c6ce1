"""Schedules, costs, programs and timelines as values. The modules of this folder need the standard library only, and
must not search, simulate, draw or run. In `analysis` are functions of one schedule or timeline: order, simulate, lower,
measures. In `soundness` is what is wrong with a schedule or its programs.
"""
