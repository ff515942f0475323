"""The simulated world: virtual time, an in-memory network, an engine and a client, all from one seed."""
