"""A program of torch.distributed.pipelining on pipeflow's engine."""
