"""This process among the others: its place, its connections to other ranks, and the reporting of failures."""
