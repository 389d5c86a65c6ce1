"""GPT-3 with 175 billion weights on eight machines with eight devices each: one pipeline stage per machine."""

NUM_EPOCHS = 60
SEQ_LEN = 2048
BATCH_SIZE = 192
NUM_MICRO_BATCHES = 192
NUM_CHUNKS = None
TENSOR_SHAPE = (1, 2048, 12288)

model = dict(type="GPT3_pipeline_hybrid", checkpoint=True)
parallel = dict(pipeline=8, tensor=dict(mode="1d", size=8))
fp16 = dict(mode="parameters")
clip_grad_norm = 1.0
gradient_accumulation = 1
