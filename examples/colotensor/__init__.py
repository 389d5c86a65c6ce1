"""GPT-2 of transformers over tensor ranks with ColoTensor's names, and its shards over replicas."""
