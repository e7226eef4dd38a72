"""What a person runs: a verb is a file."""
