"""What is said when something fails, and what is recorded and measured."""
