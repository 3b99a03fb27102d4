"""The gradient of the rows of a grouped product with FP4 weights, on Hopper."""
