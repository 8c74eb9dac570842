"""The averaging server and its parts: weighting, combining rule, step and ledgers."""
