"""Model repositories in object stores and on the Hugging Face Hub, of which models are copied when they are loaded."""
