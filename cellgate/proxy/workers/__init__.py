"""Several processes for one gate: workers have the clients, one has the Board. See docs/workers.md."""
