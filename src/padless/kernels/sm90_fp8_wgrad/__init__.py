"""Weight gradients of grouped layers on Hopper, FP8 with block scales."""
