"""How a stage's output gets to the next one: trees, channels, and who owns received memory."""
