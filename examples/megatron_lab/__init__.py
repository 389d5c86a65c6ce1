"""The Megatron tensor-parallel lab on pipeflow, with Megatron-LM's names."""
