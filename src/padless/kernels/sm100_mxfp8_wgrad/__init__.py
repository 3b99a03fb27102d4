"""Weight gradients on Blackwell, MXFP8."""
