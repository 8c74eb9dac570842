"""Hyperparameter search for several methods with equal budgets, on validation rows; `consilience tune`."""
