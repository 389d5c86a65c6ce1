"""The names of Megatron-LM's labs: `megatron.x` is `pipeflow.megatron.x`. Each is one of pipeflow's own, or a thin
adapter of it. Where Megatron-LM has sequences first, (sequence, batch, hidden), everything here has batches first.
"""
