"""What the blocks of a fused layer did and when, as events, a table and a picture."""
