"""Problems of the benchmarks of more than one product: points, operands, float64 rows."""
