"""The Megatron tensor-parallel lab on pipeflow: the lab (`lab`), Megatron-LM's names (`megatron`), data (`samples`)."""
