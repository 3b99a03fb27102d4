"""Order of memory operations: races and reports."""
