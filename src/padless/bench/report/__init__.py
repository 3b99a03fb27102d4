"""Records as tables and figures, beside the limits of the machine."""
