"""Open-loop replay of a trace through a router, before simulated units of a fixed model."""
