"""Cuts a model into stages by naming modules, and runs each stage by the model's own forward()."""
