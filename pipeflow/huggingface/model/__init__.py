"""Pipelines of transformers models: made, loaded and saved."""
