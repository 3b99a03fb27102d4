"""Execution of a launch."""
