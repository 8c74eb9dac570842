"""What may cross a process boundary: strict arrays, templates of what is expected, admission of replies."""
