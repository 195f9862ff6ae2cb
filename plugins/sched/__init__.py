"""Who runs next, how much of it, who gives way."""
