"""Plug-ins for frameworks. Importing padless imports none of them; each says what it needs."""
