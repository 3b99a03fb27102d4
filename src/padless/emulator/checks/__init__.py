"""Checks of registers, exits and deadlocks."""
