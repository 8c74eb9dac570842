"""Clients in other processes and other organisations: trees travel in Flower's messages (`pip install
"consilience[flower]"`)."""
