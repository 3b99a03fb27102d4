"""Public calls."""
