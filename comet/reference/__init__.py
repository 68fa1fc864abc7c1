"""The experts of a layer in plain torch: all on one rank, or spread over ranks with all-to-alls."""
