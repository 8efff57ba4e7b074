"""The Responses API of OpenAI: translates its requests to chats, and the output of a chat to its objects and events."""
