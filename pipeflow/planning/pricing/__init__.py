"""Plans of any module: its operations are counted on fake tensors, and the planner prices them. Must not contain: rates
of devices, and how a module is cut.
"""
