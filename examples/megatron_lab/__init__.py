"""The Megatron tensor-parallel lab on pipeflow, by Megatron-LM's names."""
