"""The OpenAI API: converts requests to inputs of models, and responses to objects and chunks."""
