"""What runs a program: trees, channels, rendezvous, microbatches, the executor."""
