"""The names of Megatron-LM's labs: `pipeflow.megatron.x` replaces `megatron.x`. Each is one of pipeflow's own classes
or functions, or a thin adapter of it. Megatron-LM's tensors are (sequence, batch, hidden); here the batch comes first.
"""
