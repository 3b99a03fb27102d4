"""Calls in other libraries' words: torch's and cuDNN's."""
