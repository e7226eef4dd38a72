"""The search for a good program: a list scheduler, its settings, and moves that improve what it made."""
