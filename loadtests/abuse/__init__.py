"""The abuse suite: what one client or one unit can do to all others on a gate as it is by default."""
