"""Ring attention: queries stay, K and V go round the devices of the context axis."""
