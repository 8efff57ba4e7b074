"""The response cache: what is kept (``entries``), under which key (``keys``), and where (``local``, ``redis``)."""
