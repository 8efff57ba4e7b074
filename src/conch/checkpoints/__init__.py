"""What a Hugging Face checkpoint is: where its files are, what they say, and its tokenizer.  Runs in workers and in
``conch convert``."""
