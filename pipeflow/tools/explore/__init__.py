"""The explorer: a page that shows schedules while their sizes and costs change, and the local server that computes what
it shows. Python computes, the page asks and paints. Must not contain: torch.
"""
