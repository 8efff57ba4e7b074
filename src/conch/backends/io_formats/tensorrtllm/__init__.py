"""The I/O format ``tensorrtllm``: token ids in, token ids out, like the in-flight batcher's model ``tensorrt_llm``."""
