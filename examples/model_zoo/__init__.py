"""The models of ColossalAI's tutorials under their names there, found by PYTHONPATH=examples."""
