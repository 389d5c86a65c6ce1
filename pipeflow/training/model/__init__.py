"""A model given as a list of layers: how layers are named, made, measured and cut into stages."""
