"""The work of each block of a fused layer over time, as events, a table and a picture."""
