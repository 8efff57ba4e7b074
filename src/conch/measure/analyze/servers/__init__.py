"""The measured servers: a local one started by the analysis, or a running remote one."""
