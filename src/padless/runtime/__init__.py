"""Runtime: from a kernel's source text to a launch. Knows no format and no kernel."""
