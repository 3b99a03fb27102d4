"""State of a launch: memory, warps, barriers, pending operations."""
