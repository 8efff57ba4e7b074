"""The server's side of worker processes: starts them, exchanges frames, handles their end; on the event loop."""
