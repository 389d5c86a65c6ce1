"""This process among the others: its place, what connects it to them, and what they tell each other when one fails."""
