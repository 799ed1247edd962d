"""The policy registry: what is registered comes back byte for byte, by alias and by number, and nothing else does."""

from pathlib import Path

import pytest

from paceline.runtime.errors import Conflict, InvalidRequest, PacelineError, UnknownName
from paceline.tuner.tracking.registry import EXPERIMENT, fetch_policy, register_policy
from paceline.tuner.tracking.store import TrackingStore, every

NAME = "paceline-policy"


def make_folder(folder: Path, content: bytes) -> Path:
    (folder / "nested").mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(content)
    (folder / "nested" / "policy.json").write_text('{"version": 1}')
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def registered(tracking: TrackingStore, tmp_path: Path) -> tuple[TrackingStore, Path, Path]:
    """A store in which version 1 holds the first folder and version 2, the champion, the second."""
    folders = [make_folder(tmp_path / f"policy {index}", bytes([index]) * 5000) for index in (1, 2)]
    for index, folder in enumerate(folders, start=1):
        version = register_policy(
            tracking,
            folder,
            name=NAME,
            metrics={"regret": 0.1 * index},
            params={"timesteps": 1000, "masked": True},
            curves={"return": [(100, 1.0), (200, 2.0)]},
        )
        assert (version.name, int(version.version)) == (NAME, index)
    return tracking, folders[0], folders[1]


def test_a_policy_comes_back_by_alias_and_by_version(
    registered: tuple[TrackingStore, Path, Path], tmp_path: Path
) -> None:
    tracking, first, second = registered
    for reference, folder in (("@champion", second), ("/1", first), ("/2", second)):
        target = tmp_path / "fetched" / reference.strip("@/")
        assert fetch_policy(tracking, f"models:/{NAME}{reference}", target) == target
        assert files(target) == files(folder)
    assert sorted(path.name for path in (tmp_path / "fetched").iterdir()) == ["1", "2", "champion"]


def test_registering_logs_a_finished_run(registered: tuple[TrackingStore, Path, Path]) -> None:
    tracking, _, _ = registered
    runs = list(every(tracking.client.search_runs, experiment_ids=[tracking.experiment_id(EXPERIMENT)]))
    assert [(run.info.status, run.info.run_name) for run in runs] == [("FINISHED", NAME)] * 2
    run = max(runs, key=lambda run: run.data.metrics["regret"])
    assert run.data.params == {"timesteps": "1000", "masked": "true"}
    assert run.data.metrics == {"regret": 0.2, "return": 2.0}
    points = tracking.client.get_metric_history(run.info.run_id, "return")
    assert [(point.step, point.value) for point in points] == [(100, 1.0), (200, 2.0)]
    assert tracking.client.get_model_version_by_alias(NAME, "champion").run_id == run.info.run_id


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("models:/paceline-polcy@champion", "unknown registered policy .* did you mean 'paceline-policy'"),
        (f"models:/{NAME}@champoin", f"unknown alias of {NAME} .* did you mean 'champion'"),
        (f"models:/{NAME}/7", f"unknown version of {NAME} '7'; known: 1, 2"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(
    registered: tuple[TrackingStore, Path, Path], tmp_path: Path, reference: str, message: str
) -> None:
    with pytest.raises(UnknownName, match=message):
        fetch_policy(registered[0], reference, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("reference", ["paceline-policy", f"models:/{NAME}", f"models:/{NAME}/last", "runs:/1/x"])
def test_another_form_of_reference_is_refused(tracking: TrackingStore, tmp_path: Path, reference: str) -> None:
    with pytest.raises(InvalidRequest, match="must be models:/NAME@ALIAS or models:/NAME/VERSION"):
        fetch_policy(tracking, reference, tmp_path / "target")


def test_an_existing_target_is_kept(registered: tuple[TrackingStore, Path, Path]) -> None:
    tracking, first, _ = registered
    before = files(first)
    with pytest.raises(Conflict, match="is already there"):
        fetch_policy(tracking, f"models:/{NAME}@champion", first)
    assert files(first) == before


def test_what_is_no_folder_is_refused_before_a_run_is_made(tracking: TrackingStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be a folder"):
        register_policy(tracking, tmp_path / "none", name=NAME, metrics={}, params={})
    assert tracking.client.get_experiment_by_name(EXPERIMENT) is None


def test_a_refused_name_fails_the_run(tracking: TrackingStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", b"x")
    with pytest.raises(PacelineError, match="name"):
        register_policy(tracking, folder, name="a/b", metrics={}, params={})
    (run,) = every(tracking.client.search_runs, experiment_ids=[tracking.experiment_id(EXPERIMENT)])
    assert run.info.status == "FAILED"
