"""Several methods on the same federation, start, trace and budget, over several seeds: `consilience compare`."""
