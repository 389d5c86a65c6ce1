"""Models of transformers that are trained through a pipeline by transformers' Trainer; README.md says what is where."""
