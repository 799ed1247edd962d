"""Policies: what to try next, learned or not; stored, and served over gRPC."""
