"""The models of ColossalAI's tutorials under their names there; set PYTHONPATH=examples to import them."""
