"""Requests of the world, read from files in the formats in which traces are published."""
