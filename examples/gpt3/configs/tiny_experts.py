"""A small GPT with four experts in each layer, on four processes: a pipeline of two stages, whose two replicas divide
the experts.
"""

NUM_EPOCHS = 1
SEQ_LEN = 64
BATCH_SIZE = 16
NUM_MICRO_BATCHES = 4
NUM_CHUNKS = None
TENSOR_SHAPE = (4, 64, 128)
LEARNING_RATE = 0.003

model = dict(type="GPT_tiny_pipeline_hybrid", experts=4, top_k=2)
parallel = dict(pipeline=2, experts=2)
clip_grad_norm = 1.0
