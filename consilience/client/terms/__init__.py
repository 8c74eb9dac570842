"""Terms added to a client's loss: each is a scalar function of (params, context, batch)."""
