"""What an analysis is told: its options, from the command line and from a file."""
