"""How an OpenAI-compatible API serves more and more users. Locust asks, and a report tells."""
