"""Drill: gates that share a Redis, and what it costs, carries, and may suffer. See docs/drills.md."""
