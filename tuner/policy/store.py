"""A policy on disk: a folder of `weights.safetensors` and `policy.json`. Nothing is ever unpickled.

`policy.json` holds the manifest and its digest: the SHA-256 over the manifest's canonical JSON and the weights file.
Any change of either file is found on loading.
"""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes

from paceline.env.observation import CONTEXT_FEATURES, TuningCase, candidate_features
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.errors import Conflict, CorruptFile, InvalidRequest
from paceline.tuner.policy.decide import choose_highest
from paceline.tuner.policy.evaluate import LearningCurve
from paceline.tuner.policy.network import CandidateScorer

FORMAT = 1
"""Version of the folder's layout and of the architecture that `Manifest` describes."""
MANIFEST_FILE = "policy.json"
WEIGHTS_FILE = "weights.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a policy but its weights."""

    format: int
    """FORMAT of the release that stored it."""
    knob_version: str
    """Knob space it was trained for."""
    candidate_features: tuple[str, ...]
    """Names of the candidate features, in order."""
    context_features: tuple[str, ...]
    """Names of the context features, in order."""
    hidden: tuple[int, ...]
    """Units of each hidden layer of the scorer."""
    prior_scale: float
    """Weight of the belief's acquisition in a logit."""
    candidates: int
    """Candidates it ranks at once."""
    training: dict[str, Any]
    """The `TrainConfig` it was trained with."""
    learning_curve: LearningCurve
    """How it did on held-out sessions while it learned."""

    def scorer(self) -> CandidateScorer:
        """A new, untrained scorer of this architecture."""
        width = len(self.candidate_features) + len(self.context_features)
        return CandidateScorer(width, hidden=self.hidden, prior_scale=self.prior_scale)


@dataclass(frozen=True, eq=False)
class StoredPolicy:
    """A learned policy as `load` and `save` return it. Keeps no state between questions, so threads may share it."""

    manifest: Manifest
    """What it is."""
    scorer: CandidateScorer
    """Its weights, in evaluation mode."""
    digest: str
    """SHA-256 over manifest and weights, hex."""
    name: str = "policy"

    def choose(self, case: TuningCase, trials: Sequence[TrialResult]) -> int:
        """The candidate of highest logit. Raises InvalidRequest for a case of another knob space."""
        self.require(case.space)
        return choose_highest(self.scorer, case, trials)

    def require(self, space: KnobSpace) -> Self:
        """Return the policy itself. Raises InvalidRequest when it was trained for another knob space or layout."""
        manifest = self.manifest
        if manifest.knob_version != space.version:
            raise InvalidRequest(
                f"policy {self.digest[:12]} was trained for knob space {manifest.knob_version}, not {space.version}; "
                "train one for it with `paceline train`"
            )
        if (manifest.candidate_features, manifest.context_features) != (
            candidate_features(space),
            CONTEXT_FEATURES,
        ):
            raise InvalidRequest(
                f"policy {self.digest[:12]} reads other features than this release of Paceline computes; "
                "train one with `paceline train`"
            )
        return self


def save(manifest: Manifest, scorer: CandidateScorer, folder: Path) -> StoredPolicy:
    """Write a new folder, complete or not at all, and return what `load` finds there.

    Raises as `check_target` does.
    """
    check_target(folder)
    folder = folder.resolve()
    weights = tensors_to_bytes(scorer.state_dict())
    document = {"digest": _digest(dataclasses.asdict(manifest), weights), "manifest": dataclasses.asdict(manifest)}
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (unfinished / WEIGHTS_FILE).write_bytes(weights)
        (unfinished / MANIFEST_FILE).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return load(folder)


def check_target(folder: Path) -> None:
    """Make the folder's parents, so that `save` can not fail after a long training.

    Raises Conflict when `folder` exists and is not empty, and InvalidRequest when it cannot be made.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Conflict(f"{folder} is already there; name a folder that does not exist yet")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder.parent).cleanup()
    except OSError as error:
        raise InvalidRequest(
            f"{folder} cannot be made: {error.strerror} ({error.filename}); name a folder that can be written"
        ) from None


def load(folder: Path) -> StoredPolicy:
    """Read a policy. Raises CorruptFile when a file is missing, truncated, altered or not one of ours."""
    try:
        document = json.loads((folder / MANIFEST_FILE).read_bytes())
        weights = (folder / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise CorruptFile(f"{folder} is no policy: {error.strerror} ({error.filename})") from None
    except (ValueError, RecursionError):
        raise CorruptFile(f"{folder / MANIFEST_FILE} is truncated or not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("manifest"), dict):
        raise CorruptFile(f"{folder / MANIFEST_FILE} is not the manifest of a policy")
    if document["manifest"].get("format") != FORMAT:
        raise CorruptFile(f"{folder} has format {document['manifest'].get('format')!r}; this release reads {FORMAT}")
    digest = _digest(document["manifest"], weights)
    if digest != document.get("digest"):
        raise CorruptFile(f"{folder} was altered: its files do not have the digest {document.get('digest')!r}")
    try:
        manifest = TypeAdapter(Manifest).validate_python(document["manifest"])
        # Without memory, so that shapes are checked before a file's claims are believed.
        with torch.device("meta"):
            scorer = manifest.scorer()
        scorer.load_state_dict(tensors_from_bytes(weights), assign=True)
    except (ValidationError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptFile(f"{folder} does not hold a policy of format {FORMAT}: {reason}") from None
    return StoredPolicy(manifest, scorer.float().eval().requires_grad_(False), digest)


def _digest(manifest: dict[str, Any], weights: bytes) -> str:
    canonical = json.dumps(manifest, sort_keys=True).encode()
    return hashlib.sha256(canonical + weights).hexdigest()
