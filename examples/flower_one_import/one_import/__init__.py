"""An ordinary Flower app whose strategy comes from consilience."""
