"""Clients in other processes and other organisations: trees are sent in Flower's messages (`pip install
"consilience[flower]"`)."""
