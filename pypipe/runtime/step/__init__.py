"""One rank's part of a step: its list of actions, and the stages that run them."""
