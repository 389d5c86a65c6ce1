"""This process among the others: its place, its connections to other ranks, and how failures are reported to all ranks.
"""
