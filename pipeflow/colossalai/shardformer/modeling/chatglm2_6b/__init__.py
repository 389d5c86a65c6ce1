"""ChatGLM-2 under ColossalAI's names: it is GLM here, which transformers has, and of which any other model is cut."""
