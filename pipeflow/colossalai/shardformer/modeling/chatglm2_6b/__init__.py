"""ChatGLM-2 under ColossalAI's names: here it is transformers' GLM, cut like any other model."""
