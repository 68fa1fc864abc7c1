"""What drafts of speculative decoding are worth."""
