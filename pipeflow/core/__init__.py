"""The data types of schedules, costs, programs and timelines. Standard library only. Must not contain: code that
searches, simulates, draws or runs them.
"""
