"""Kernels: a folder each with configuration, host side and device files; and what they share."""
