"""Timelines as one page for a browser. Its look and behaviour are in the files beside `timeline_page.py`."""
