"""Builders: functions that make the programs of known schedules, and their registry."""
