"""Text from a model: prompts are read at once, then tokens are made one at a time with a cache of keys and values."""
