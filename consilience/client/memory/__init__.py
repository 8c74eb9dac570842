"""What a client remembers from one participation to the next, and what it says of it."""
