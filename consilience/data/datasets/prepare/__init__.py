"""From arrays to a `Dataset`: splitting, scaling, encoding words and labels, and final checks."""
