"""Error messages, checks, records and traces."""
