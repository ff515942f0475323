"""How a running gate gives its listening sockets, and what it knows of its units, to a new process."""
