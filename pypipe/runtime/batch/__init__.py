"""Cutting a batch into microbatches, and joining their outputs."""
