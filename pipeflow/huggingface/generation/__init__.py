"""Text generation with the stages of a language model."""
