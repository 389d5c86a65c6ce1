"""Memory: schedules with recomputations, offloads and unshards, and the search for both order and memory."""
