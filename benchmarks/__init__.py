"""Benchmarks: pipeflow beside torch.distributed.pipelining and a loop written by hand, in the same run.

`python -m benchmarks` runs all of them, `python -m benchmarks NAME` one. See README.md.
"""
