"""Validation of untrusted replies: strict array parsing, templates of expected replies, admission."""
