"""The checks of ``padless verify`` for layers that train."""
