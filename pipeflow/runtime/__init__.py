"""The engine: runs a plan. A Schedule is handed in; nothing here knows any schedule by name."""
