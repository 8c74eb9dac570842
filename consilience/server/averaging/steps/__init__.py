"""Server steps: the update of the global model towards the merged model."""
