"""What is used everywhere and knows nothing of experts."""
