"""Distances, angles and similarities between clients' models."""
