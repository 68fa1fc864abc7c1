"""One file a suite: what is measured, its options, and what is printed."""
