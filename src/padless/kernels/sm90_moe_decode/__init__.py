"""A Mixture-of-Experts layer of few tokens in one launch on Hopper, FP8 with block scales."""
