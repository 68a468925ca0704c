"""Steps of models at real size, compiled from shapes alone, and the clock that times them."""
