"""The response cache: its interface, entries and keys (``cache``), and its stores (``local``, ``redis``)."""
