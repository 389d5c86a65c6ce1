"""Train a small LLaMA with a loss of the trainer's own, in which words that it knows count less. Without the lines that
end in `# parallel` this is a transformers script for one process.
"""

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pipeflow  # parallel
from pipeflow.huggingface import pipelined  # parallel


class FocalTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        outputs = model(**inputs)
        told = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        loss = -((1 - told.exp()) ** 2 * told).sum() / (num_items_in_batch or labels.numel())
        return (loss, outputs) if return_outputs else loss


pipeflow.launch(pipeline=2)  # parallel
FocalTrainer = pipelined(FocalTrainer)  # parallel
[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(arguments.seed)
words = torch.arange(64).expand(256, 64).clone()
words = (words + torch.randint(64, (256, 1))) % 64  # each word follows from the one before
data = [{"input_ids": each, "labels": each} for each in words]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
example = {name: torch.stack([each[name] for each in data[:4]]) for name in data[0]}  # parallel
schedule = pipeflow.make_schedule("1f1b", ranks=2, microbatches=4)  # parallel
model = pipeflow.Pipeline.from_module(model, schedule, example)  # parallel
trainer = FocalTrainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model()
trainer.save_state()
