"""How heterogeneous is a federation, in which ways, and what follows: `consilience diagnose`."""
