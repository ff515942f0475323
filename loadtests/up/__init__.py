"""deploy/compose as plain processes."""
