"""Environment variables that several packages use."""

from typing import Final

#: An API key of the server. Processes that run models do not get it.
API_KEY: Final = "CONCH_API_KEY"
