"""Transports: how ranks send tensors to each other and compute collectives. The protocols and their implementations."""
