"""Policies in MLflow's model registry: one folder per version, found by alias or by number."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from paceline.runtime.errors import Conflict, InvalidRequest, UnknownName
from paceline.tuner.tracking.run import TrackedRun
from paceline.tuner.tracking.store import TrackingStore, every

EXPERIMENT = "paceline-policies"
_FOLDER = "policy"
T = TypeVar("T")

_REFERENCE = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


def register_policy(
    tracking: TrackingStore,
    folder: Path,
    *,
    name: str,
    metrics: Mapping[str, float],
    params: Mapping[str, Any],
    curves: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    alias: str = "champion",
) -> ModelVersion:
    """Log a policy folder as artifacts of a run, and register it as the next version of `name`.

    `curves` are metrics over steps, as (step, value). The alias moves here from the version that held it.
    Raises InvalidRequest when `folder` is none, and PacelineError when the registry refuses a name.
    """
    if not folder.is_dir():
        raise InvalidRequest(f"policy {folder} must be a folder")
    with tracking.errors():
        experiment_id = tracking.experiment_id(EXPERIMENT)
    with TrackedRun(tracking, experiment_id=experiment_id, kind="policy", name=name, tags={}, params=params) as run:
        for curve, points in (curves or {}).items():
            for step, value in points:
                run.log({curve: value}, step=step)
        run.log(metrics)
        with tracking.errors():
            tracking.client.log_artifacts(run.run_id, str(folder), _FOLDER)
            _create_registered_model(tracking, name)
            source = f"{tracking.client.get_run(run.run_id).info.artifact_uri}/{_FOLDER}"
            version = tracking.client.create_model_version(name, source, run_id=run.run_id)
            tracking.client.set_registered_model_alias(name, alias, version.version)
    return version


def fetch_policy(tracking: TrackingStore, reference: str, target: Path) -> Path:
    """Copy a registered policy into the folder `target`, which must not exist yet, and return it.

    `reference` is `models:/NAME@ALIAS` or `models:/NAME/VERSION`. Raises InvalidRequest for any other form,
    UnknownName with the nearest known name, and Conflict when `target` is there.
    """
    version = _find(tracking, reference)
    if target.exists():
        raise Conflict(f"{target} is already there; name a folder that does not exist yet")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished, tracking.errors():
        source = tracking.client.get_model_version_download_uri(version.name, version.version)
        copied = download_artifacts(artifact_uri=source, dst_path=unfinished, tracking_uri=tracking.uri)
        Path(copied).replace(target)
    return target


def _create_registered_model(tracking: TrackingStore, name: str) -> None:
    try:
        tracking.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _find(tracking: TrackingStore, reference: str) -> ModelVersion:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise InvalidRequest(
            f"policy reference {reference!r} must be models:/NAME@ALIAS or models:/NAME/VERSION; "
            "for example models:/paceline-policy@champion"
        )
    name, alias = match["name"], match["alias"]
    versions: dict[str, ModelVersion]
    with tracking.errors():
        models = {model.name: model for model in every(tracking.client.search_registered_models)}
        model = _named("registered policy", name, models)
        versions = {
            str(version.version): version
            for version in every(tracking.client.search_model_versions, filter_string=f"name='{name}'")
        }
    aliases = {key: versions[str(number)] for key, number in model.aliases.items()}
    if alias is None:
        return _named(f"version of {name}", match["version"], versions)
    return _named(f"alias of {name}", alias, aliases)


def _named(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise UnknownName(kind, name, known)
    return known[name]
