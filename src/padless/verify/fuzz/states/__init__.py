"""Random sequences of operations on modules and call sites, each compared with a fresh one: ``padless fuzz --states``."""
