"""Gates, units and agents as processes of their own, as an operator starts them."""
