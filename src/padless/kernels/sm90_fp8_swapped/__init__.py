"""FP8_BLOCK x FP8_BLOCK on Hopper, weights on the rows of the tensor core's products and tokens on their columns."""
