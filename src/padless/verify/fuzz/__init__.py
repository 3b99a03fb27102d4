"""Random problems over every public call, judged by float64 and by each other: ``padless fuzz``."""
