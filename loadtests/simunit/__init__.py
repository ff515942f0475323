"""A simulated inference unit: a leader and followers as real processes behind an OpenAI-compatible API.

`python -m loadtests.simunit` starts one; `process.SimUnit` starts and hurts one from Python.
What must stay true: the text is a function of the rendered prompt alone; time is a stated model
(`engine.py`); every step truly waits for every follower (`collective.py`), so that a signal to a follower
hurts as it does in life.
"""
