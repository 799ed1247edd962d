"""Where commands find what is kept: the tracking store, and policies in a folder or in its registry."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.tuner.cli.options import POLICY_NAME

if TYPE_CHECKING:
    from paceline.tuner.policy.store import StoredPolicy
    from paceline.tuner.tracking.store import TrackingStore


def open_tracking(uri: str | None) -> "TrackingStore":
    """The tracking store of the URI, or of this user. Raises what `open_store` raises."""
    from paceline.tuner.tracking.store import default_tracking_uri, open_store

    return open_store(uri or default_tracking_uri())


def open_policy(reference: str, tracking_uri: str | None) -> "StoredPolicy":
    """The policy in a folder, or in the registry if the reference begins with `models:/`.

    Raises CorruptFile for what is no policy, and what the tracking store and its registry raise.
    """
    from paceline.tuner.policy.store import load

    if not reference.startswith("models:/"):
        return load(Path(reference))
    from paceline.tuner.tracking.registry import fetch_policy

    with tempfile.TemporaryDirectory() as folder:
        return load(fetch_policy(open_tracking(tracking_uri), reference, Path(folder) / "policy"))


def register(policy: "StoredPolicy", folder: Path, tracking: "TrackingStore") -> tuple[str, str]:
    """Register a stored policy as the champion; the reference of its version, and the id of its MLflow run."""
    from paceline.tuner.tracking.registry import register_policy

    manifest = policy.manifest
    curve = manifest.learning_curve
    version = register_policy(
        tracking,
        folder,
        name=POLICY_NAME,
        metrics={f"heldout/{name}/log_gain": score.log_gain for name, score in curve.baselines.items()},
        params={**manifest.training, "digest": policy.digest, "knob_version": manifest.knob_version},
        curves={
            "heldout/log_gain": [(point.timesteps, point.score.log_gain) for point in curve.points],
            "heldout/regret": [(point.timesteps, point.score.regret) for point in curve.points],
        },
    )
    return f"models:/{POLICY_NAME}/{version.version}", str(version.run_id)
