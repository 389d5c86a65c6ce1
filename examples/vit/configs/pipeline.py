"""A pipeline of two processes, with half of the layers each."""

IMG_SIZE = 32
PATCH_SIZE = 8
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1  # the patches and the class token
HIDDEN_SIZE = 64
DEPTH = 4
NUM_HEADS = 4
MLP_RATIO = 4
NUM_CLASSES = 10
DROP_RATE = 0.0
DROP_PATH = 0.0
CHECKPOINT = False  # True keeps only each layer's input, and recomputes the layer in the backward

NUM_EPOCHS = 30
WARMUP_EPOCHS = 5
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
MIXUP_ALPHA = 0.2
clip_grad_norm = 1.0
seed = 0

parallel = dict(pipeline=2)
BATCH_SIZE = 64
NUM_MICRO_BATCHES = 4
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
