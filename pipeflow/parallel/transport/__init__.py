"""How ranks move tensors to each other, one to one and together: the protocols, and their implementations."""
