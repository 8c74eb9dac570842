"""What is added to a client's own loss: each term is a scalar function of (params, context, batch)."""
