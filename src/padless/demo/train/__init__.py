"""A small Mixture-of-Experts language model, trained in bf16 and in FP8 side by side: `padless train-demo`."""
