"""Measures devices and links, and infers the tiers of the network from what it measured."""
