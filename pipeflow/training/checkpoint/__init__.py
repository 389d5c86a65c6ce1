"""Checkpoints: a run's state in a folder, in the format of torch.distributed.checkpoint, which reads them too, and
weights in safetensors files. `save`, `load` and `safetensors` are what users call; the other files serve them.
"""
