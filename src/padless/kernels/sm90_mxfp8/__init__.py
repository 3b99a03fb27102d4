"""MXFP8 x MXFP8 on Hopper's FP8 tensor cores."""
