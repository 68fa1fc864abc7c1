"""Block FP8, MXFP8 and MXFP4: formats, quantisers, and rows as they travel."""
