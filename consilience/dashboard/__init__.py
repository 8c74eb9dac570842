"""Dashboard: runs in progress in a browser; read-only unless control of runs is allowed."""
