"""The Gymnasium environment of a tuning session, over a live runtime or the simulator."""

import gymnasium

if __name__ != "paceline.env":
    raise ImportError(f"import this package as paceline.env, not {__name__}")

gymnasium.register(id="paceline/Tuning-v0", entry_point="paceline.env.tuning:TuningEnv")
