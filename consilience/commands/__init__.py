"""Commands that answer a question or prepare a run: list, show-algorithm, init, check and predict."""
