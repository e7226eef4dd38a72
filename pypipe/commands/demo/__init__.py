"""`pypipe demo`: a small GPT, trained in a pipeline of processes on this machine."""
