"""The known schedules, by family; each builder is registered under its name."""
