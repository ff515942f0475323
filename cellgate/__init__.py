VERSION = "0.1.0"
"""Of Cellgate, stated here alone; `importlib.metadata` would look it up for a megabyte."""
