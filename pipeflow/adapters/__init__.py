"""Adapters, which let scripts of other libraries train with pipeflow: `huggingface`, `lightning`, `accelerate` and
`pipelining` (torch's). The modules of this folder are what they share, and must not contain what only one needs:

- `libraries`: how a library is imported and parts of it are replaced, and what no adapter can do
- `ranks`: the context, and what its ranks tell each other: barriers, decisions, outputs of the last stage, values of
  replicas, and an Accelerator's operations on them
- `batches`: how many samples a batch has, and which of them a replica reads
- `random_states`: random numbers of layers and of data, apart from those of the script
- `cut_model`: a model that is cut at its first batch, and one whose call runs a step, whose gradients wait for the
  backward of its loss
- `outputs`: what such a call returns
"""
