"""A small GPT on two processes: a pipeline of two ranks, with two stages each."""

NUM_EPOCHS = 1
SEQ_LEN = 64
BATCH_SIZE = 16
NUM_MICRO_BATCHES = 4
NUM_CHUNKS = 2
TENSOR_SHAPE = (4, 64, 128)
LEARNING_RATE = 0.003

model = dict(type="GPT_tiny_pipeline_hybrid")
parallel = dict(pipeline=2)
clip_grad_norm = 1.0
