"""The console at ``/console``: static files, one event stream with the overview, and the data of a model's page."""
