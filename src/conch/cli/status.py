"""Exit statuses of commands besides 0 for success and 1 for an error."""

from typing import Final

#: What shells say of a program that Ctrl+C has ended.
INTERRUPTED: Final = 130
