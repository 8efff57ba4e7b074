"""What a conversion found out, for people: on the terminal, as Markdown and as HTML."""
