"""From arrays to a `Dataset`: splitting, scaling, numbering words and labels, and the last checks."""
