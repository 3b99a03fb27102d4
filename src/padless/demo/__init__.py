"""`padless demo`."""
