"""Where nodes stand in the network: read from what clouds and clusters tell, and grouped into units."""
