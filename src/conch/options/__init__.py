"""Options of commands: their declaration, and the formats of their values."""
