"""Control messages between ranks, beside the tensors that they exchange: who lives, who waits, what failed."""
