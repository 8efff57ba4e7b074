"""Exit statuses of commands besides 0 for success and 1 for an error."""

from typing import Final

#: The status that shells report for a program ended by Ctrl+C.
INTERRUPTED: Final = 130
