"""Waves of a thousand clients, and whether the gate is afterwards as it was before."""
