"""What a layer computes, in plain torch: with all experts on a rank, and over ranks by all-to-alls."""
