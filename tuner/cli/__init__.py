"""The command line. One file per command; each imports what it needs when it runs, so that `--help` is quick."""

from paceline.tuner.cli.app import main

__all__ = ["main"]
