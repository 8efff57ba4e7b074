"""Reports of a conversion: for the terminal, as Markdown and as HTML."""
