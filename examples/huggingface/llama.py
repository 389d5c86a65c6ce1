"""Train a small LLaMA on $DATA, with one {"text": ...} per line, by default the sources of Python's standard library.
Without the lines that end in `# parallel` this is a transformers script for one process.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

import pipeflow  # parallel
from gpt3.data import prepare
from pipeflow.huggingface import Trainer  # noqa: F811  # parallel

pipeflow.launch(pipeline=2, tensor=2)  # parallel
[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(arguments.seed)
corpus = prepare(Path(os.environ["DATA"]) if os.environ.get("DATA") else None, vocabulary=2048)
training, held_out = (
    [{"input_ids": ids, "labels": ids} for ids in tokens.long().split(128)[:-1]]
    for tokens in (corpus.training, corpus.held_out[: 128 * 64])
)
sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, max_position_embeddings=128, **sizes))
schedule = pipeflow.make_schedule("1f1b", ranks=2, microbatches=4)  # parallel
example = {key: training[0][key].expand(4, -1) for key in training[0]}  # parallel
model = pipeflow.Pipeline.from_module(model, schedule, example)  # parallel
trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=held_out)
trainer.train(arguments.resume_from_checkpoint)
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()
trainer.save_state()
