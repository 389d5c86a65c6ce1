"""Stages of any module: where it can be cut, what each stage receives, sends and owns, and the stages themselves, which
run the module's own forward. Must not contain: ranks, schedules, and weights of losses in a step.
"""
