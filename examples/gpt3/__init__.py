"""Trains a GPT through a pipeline; README.md lists the files."""
