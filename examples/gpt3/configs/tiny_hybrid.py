"""A small GPT in 16 bits on four processes: a pipeline of two stages, with two tensor ranks each; eight processes make
two replicas.
"""

NUM_EPOCHS = 1
SEQ_LEN = 64
BATCH_SIZE = 16
NUM_MICRO_BATCHES = 4
NUM_CHUNKS = None
TENSOR_SHAPE = (4, 64, 128)
LEARNING_RATE = 0.001

model = dict(type="GPT_tiny_pipeline_hybrid", checkpoint=True)
parallel = dict(pipeline=2, tensor=dict(mode="1d", size=2))
fp16 = dict(mode="parameters", initial_scale=1024)
clip_grad_norm = 1.0
gradient_accumulation = 2
