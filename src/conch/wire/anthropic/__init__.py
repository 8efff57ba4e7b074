"""The Messages API of Anthropic: translates requests to chats, and the output of a chat to objects and events."""
