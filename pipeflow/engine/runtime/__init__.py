"""The engine, which runs schedules. A schedule is an argument; the engine knows no schedule by name."""
