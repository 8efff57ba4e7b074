"""Token ids in, token ids out: the model ``tensorrt_llm`` of the in-flight batcher."""
