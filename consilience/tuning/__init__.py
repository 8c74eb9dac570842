"""Searching the options of several methods with equal budgets, on validation rows; `consilience tune`."""
