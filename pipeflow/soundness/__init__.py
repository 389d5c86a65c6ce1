"""Whether a schedule, and the programs made of it, can run to their end as they should: pure functions."""
