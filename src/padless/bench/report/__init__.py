"""Records as tables and figures, next to the limits of the machine."""
