"""Model repositories in object stores and on the Hugging Face Hub; models are copied when they are loaded."""
