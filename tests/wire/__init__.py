"""What the tests of the byte path share: a gate without probes, units that play a script, a strict client."""
