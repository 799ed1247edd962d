"""Learns and serves: train, tune, policy, policy server, MLflow tracking, command line."""

if __name__ != "paceline.tuner":
    raise ImportError(f"import this package as paceline.tuner, not {__name__}")
