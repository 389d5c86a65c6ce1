"""Trains transformers models through a pipeline with transformers' Trainer; README.md lists the files."""
