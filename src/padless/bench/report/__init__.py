"""Records as tables (terminal and Markdown) and figures, beside the limits of the machine."""
