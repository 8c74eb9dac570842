"""Weight the replies, combine them, take a step: the usual server, and its parts."""
