"""What load tools are made of: gates, agents, users and the like as processes or from outside."""
