"""Tools that tests, verification, benchmarks and tuning share."""
