"""Random sequences of operations on modules and call sites, compared with fresh ones: ``padless fuzz --states``."""
