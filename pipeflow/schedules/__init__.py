"""The schedules there are, by name, and the one function that makes them. A family is one small file beside this one:
a pure function from (ranks, microbatches, options) to a Schedule.
"""

from pipeflow.schedules.registry import SCHEDULES, make_schedule, options_of

__all__ = ["SCHEDULES", "make_schedule", "options_of"]
