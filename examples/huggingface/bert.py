"""Train a BERT classifier that tells which package of Python's standard library a piece of code is from. Without the
lines that end in `# parallel` this is a transformers script for one process.
"""

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

import pipeflow  # parallel
from gpt3.data import LIBRARY, prepare
from pipeflow.huggingface import Trainer  # noqa: F811  # parallel

pipeflow.launch(pipeline=2)  # parallel
[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(arguments.seed)
tokenizer, samples = prepare(None, vocabulary=2048).tokenizer, []
for label, package in enumerate(["asyncio", "email", "importlib", "unittest"]):
    text = "".join(file.read_text(encoding="utf-8") for file in sorted((LIBRARY / package).rglob("*.py")))
    pieces = torch.tensor(tokenizer.encode(text).ids).split(64)[:-1]
    samples += [{"input_ids": ids, "labels": label} for ids in pieces]
sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
model = BertForSequenceClassification(BertConfig(vocab_size=2048, num_labels=4, **sizes))
schedule = pipeflow.make_schedule("1f1b", ranks=2, microbatches=4)  # parallel
example = {"input_ids": pieces[0].expand(4, -1), "labels": torch.zeros(4, dtype=torch.long)}  # parallel
model = pipeflow.Pipeline.from_module(model, schedule, example)  # parallel
rest = [sample for number, sample in enumerate(samples) if number % 10]
accuracy = lambda told: {"accuracy": (told.predictions.argmax(-1) == told.label_ids).mean()}  # noqa: E731  # it is short
trainer = Trainer(model, arguments, train_dataset=rest, eval_dataset=samples[::10], compute_metrics=accuracy)
trainer.train(arguments.resume_from_checkpoint)
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()
