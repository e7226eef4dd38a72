"""How ranks find each other, and what they must agree on."""
