"""Drills: a YAML file says what is built, what load it gets, what befalls it, and what must hold.

`python -m loadtests.drill FILE.yaml` runs one. What must stay true: units, gates, peers and clients are real
processes on loopback; every request is accounted for by its client; none of the processes outlives the run.
"""
