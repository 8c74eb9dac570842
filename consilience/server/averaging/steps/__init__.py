"""How far the server moves towards the merged model."""
