"""Self-speculative decoding: drafts of few experts, how long they are, and their verdict."""
