"""FP8_BLOCK x FP8_BLOCK on Hopper."""
