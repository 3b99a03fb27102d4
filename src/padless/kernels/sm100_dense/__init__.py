"""The dense MXFP8 product on Blackwell."""
