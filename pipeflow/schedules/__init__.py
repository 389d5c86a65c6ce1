"""All schedules by name, and the function that makes them. Each family is one small file in this package: a pure
function from (ranks, microbatches, options) to a Schedule. `orders` searches for orders.
"""

from pipeflow.schedules.registry import SCHEDULES, make_schedule, options_of

__all__ = ["SCHEDULES", "make_schedule", "options_of"]
