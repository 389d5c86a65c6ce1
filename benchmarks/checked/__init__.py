"""Jobs of several engines that train one GPT, each with faults of its own, for `benchmarks/checking.py` and tests."""
