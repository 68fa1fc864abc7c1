"""The network's legs of a layer over nodes: tokens travel to rail peers, and partial sums travel home."""
