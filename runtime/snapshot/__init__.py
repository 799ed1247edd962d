"""Snapshots: restorable states of a trial, kept in a store."""

from paceline.runtime.snapshot.store import SnapshotStore

__all__ = ["SnapshotStore"]
