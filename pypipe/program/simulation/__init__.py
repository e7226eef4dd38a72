"""When each action of a program runs, given what each takes; and what a step was measured to take."""
