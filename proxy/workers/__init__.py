"""Several processes for one gate: workers have the clients, one brain has the Board. See docs/workers.md."""
