"""What a server says of itself, and what it uses of its machine, around the windows that are measured."""
