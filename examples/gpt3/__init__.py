"""A GPT that is trained through a pipeline; README.md says what is where."""
