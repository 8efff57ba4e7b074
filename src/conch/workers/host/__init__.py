"""The server's side of worker processes: starts them, speaks to them, notices their end.  Runs on the event loop."""
