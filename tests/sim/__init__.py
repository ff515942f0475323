"""The simulated world: virtual time, an in-memory network, engines and clients, all decided by one seed.

    world = World(seed)                                 # world.py: the loop, the network, the randomness
    engine = Engine(world, "a")                         # engine.py: a leader at http://a:8000, hurt by
    `behaviour` client = Client(world, "127.0.0.1:9000")            # client.py: asks, reads slowly, leaves
    run(world, scenario(world))                         # runs to the end; fails on errors and on leaks

`world.net` hurts the network (faults.py, network.py), `Chaos` hurts everything at random (chaos.py).
"""
