"""Calibration: a machine is measured, and the planner's cost model is fitted to the times. Must not contain: the cost
model itself.
"""
