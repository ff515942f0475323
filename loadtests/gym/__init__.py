"""The gym: the real Board, Router and policy beside other routing rules, in virtual time.

One run is a load on a fleet of simulated engines through one rival. Nothing sleeps, and all chance is of a
seeded generator, so the same seed gives the same run. It measures inside of the product: what is compared is
how units are chosen, and not what a proxy costs.
"""
