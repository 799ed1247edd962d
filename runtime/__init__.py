"""Executes: server, generations, launchers, workers, synchronisation, compression, mapping, snapshots."""

if __name__ != "paceline.runtime":
    raise ImportError(f"import this package as paceline.runtime, not {__name__}")
