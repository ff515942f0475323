VERSION = "0.1.1"
"""Of Cellgate, stated here alone; `importlib.metadata` would look it up for a megabyte."""
