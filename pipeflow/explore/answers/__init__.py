"""Answers: what the page can ask for. Each file has one question: a function from the fields of a request to JSON
values. `table` lists them.
"""
