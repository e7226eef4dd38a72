"""Running autograd's engine, whole or in halves."""
