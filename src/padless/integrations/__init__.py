"""Plug-ins for frameworks. Importing padless imports none of them; each says what it needs."""

NAME = "padless"  # of what the plug-ins register
