"""Quantization: values to block-scaled codes and back."""
