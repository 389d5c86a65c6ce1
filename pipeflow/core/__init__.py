"""The values: what a schedule, its costs and its times are made of. Standard library only; nothing here runs any."""
