"""Any module as the stages of a pipeline: where it can be cut, what each stage receives, sends and owns, and the stages
themselves, which run the module's own forward. What must not live here: ranks, schedules and losses' weights in a step.
"""
