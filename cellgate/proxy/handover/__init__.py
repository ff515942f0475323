"""Passes the listening sockets and the state of units from a running gate to a new process."""
