"""The response cache: cached responses (``entries``), cache keys (``keys``) and stores (``local``, ``redis``)."""
