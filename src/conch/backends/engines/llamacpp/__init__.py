"""The engine ``llamacpp``: runs GGUF files with llama.cpp, through the package llama-cpp-python."""
