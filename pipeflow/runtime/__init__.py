"""The engine: runs a schedule. A Schedule is handed in; nothing here knows any schedule by name."""
