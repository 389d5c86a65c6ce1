"""Timelines as one page for a browser; what it looks like and does is in the files beside `html.py`."""
