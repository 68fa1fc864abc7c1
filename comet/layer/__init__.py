"""Routed experts over ranks: plan, layer 0, layer 1, their gradients, and the memory they share."""
