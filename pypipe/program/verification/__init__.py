"""Proof that a lowered program is complete, ordered, free of deadlock and bounded in memory."""
