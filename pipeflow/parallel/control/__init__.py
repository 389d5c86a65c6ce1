"""What ranks tell each other beside the tensors that they exchange: who lives, who waits, what failed."""
