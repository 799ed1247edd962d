"""Paceline learns how the workers of a training job should synchronise, compress and be placed."""

__version__ = "0.1.0"
