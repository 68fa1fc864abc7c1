"""Published block-FP8 experts in transformers' models."""
