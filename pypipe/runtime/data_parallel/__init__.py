"""What wraps a stage's parameters for data parallelism."""
