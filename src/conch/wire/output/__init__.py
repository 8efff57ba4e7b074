"""Parsers of generated texts: the answer, the reasoning and the tool calls, as events for every API."""
