"""Load tools: what is measured and drilled on a gate from outside. Each runs as `python -m loadtests.NAME`.

`wire` is their HTTP client and the scripted engine, `simunit` the engine that behaves as a unit does, `kit`
what tools are made of: gates, agents, users, Redis, other routers. All else is a tool, in a file or a folder.
"""
