"""GPT-2 with 1.6 billion weights on four devices: a pipeline of two stages, with two tensor ranks each."""

NUM_EPOCHS = 60
SEQ_LEN = 1024
BATCH_SIZE = 192
NUM_MICRO_BATCHES = 192
NUM_CHUNKS = None
TENSOR_SHAPE = (1, 1024, 1600)

model = dict(type="GPT2_exlarge_pipeline_hybrid", checkpoint=True)
parallel = dict(pipeline=2, tensor=dict(mode="1d", size=2))
fp16 = dict(mode="parameters")
clip_grad_norm = 1.0
gradient_accumulation = 1
