"""OpenAI's API and the tensors of models: requests to inputs, responses to objects and chunks."""
