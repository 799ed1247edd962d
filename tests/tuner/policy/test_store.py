"""A stored policy: the same after reload, and refused when anything about it is wrong."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.runtime.errors import Conflict, CorruptFile, InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy import store
from paceline.tuner.policy.decide import candidate_scores
from paceline.tuner.policy.network import CandidateScorer
from paceline.tuner.policy.store import MANIFEST_FILE, WEIGHTS_FILE, Manifest, StoredPolicy, load, save
from tests.tuner.policy.simulated import Session

FILES = (MANIFEST_FILE, WEIGHTS_FILE)


def test_logits_and_actions_are_the_same_after_reload(
    scorer: CandidateScorer, folder: Path, sessions: list[Session]
) -> None:
    reloaded = load(folder)
    for session in sessions:
        before = candidate_scores(scorer, session.case, session.trials)
        after = candidate_scores(reloaded.scorer, session.case, session.trials)
        np.testing.assert_array_equal(before.view(np.int32), after.view(np.int32))
        assert load(folder).choose(session.case, session.trials) == reloaded.choose(session.case, session.trials)


def test_manifest_and_digest_are_the_same_after_reload(policy: StoredPolicy, manifest: Manifest, folder: Path) -> None:
    assert load(folder).manifest == manifest
    assert load(folder).digest == policy.digest
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_digest_covers_manifest_and_weights(manifest: Manifest, scorer: CandidateScorer, tmp_path: Path) -> None:
    first = save(manifest, scorer, tmp_path / "first")
    renamed = save(dataclasses.replace(manifest, candidates=13), scorer, tmp_path / "renamed")
    untrained = save(manifest, manifest.scorer(), tmp_path / "untrained")
    assert len({first.digest, renamed.digest, untrained.digest}) == 3


@given(file=st.sampled_from(FILES), part=st.floats(0, 1, exclude_max=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_truncated_files_are_refused(folder: Path, file: str, part: float) -> None:
    whole = (folder / file).read_bytes()
    # The last byte of the JSON file is the end of its last line.
    (folder / file).write_bytes(whole[: int(part * (len(whole) - 1))])
    try:
        with pytest.raises(CorruptFile):
            load(folder)
    finally:
        (folder / file).write_bytes(whole)


@given(part=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_altered_weights_are_refused(folder: Path, part: float, bit: int) -> None:
    whole = (folder / WEIGHTS_FILE).read_bytes()
    altered = bytearray(whole)
    altered[int(part * len(whole))] ^= 1 << bit
    (folder / WEIGHTS_FILE).write_bytes(altered)
    try:
        with pytest.raises(CorruptFile, match="altered"):
            load(folder)
    finally:
        (folder / WEIGHTS_FILE).write_bytes(whole)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Manifest)])
def test_altered_manifest_is_refused(folder: Path, name: str) -> None:
    document = json.loads((folder / MANIFEST_FILE).read_text())
    document["manifest"][name] = 3
    (folder / MANIFEST_FILE).write_text(json.dumps(document))
    with pytest.raises(CorruptFile):
        load(folder)


def resign(folder: Path, document: dict[str, object]) -> None:
    """Write a manifest with the digest that belongs to it, as someone would who knows the format."""
    manifest = document["manifest"]
    assert isinstance(manifest, dict)
    digest = store._digest(manifest, (folder / WEIGHTS_FILE).read_bytes())
    (folder / MANIFEST_FILE).write_text(json.dumps({**document, "digest": digest}))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": [16, 17]},
        {"hidden": []},
        {"hidden": [10**12]},
        {"hidden": [10**30]},
        {"hidden": [-1]},
        {"hidden": "wide"},
        {"prior_scale": None},
    ],
    ids=str,
)
def test_weights_of_another_architecture_are_refused(folder: Path, change: dict[str, object]) -> None:
    document = json.loads((folder / MANIFEST_FILE).read_text())
    document["manifest"].update(change)
    resign(folder, document)
    with pytest.raises(CorruptFile, match="does not hold a policy"):
        load(folder)


def test_unknown_format_is_refused_by_number(folder: Path) -> None:
    document = json.loads((folder / MANIFEST_FILE).read_text())
    document["manifest"]["format"] = 2
    resign(folder, document)
    with pytest.raises(CorruptFile, match="format 2; this release reads 1"):
        load(folder)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b'{"manifest": 1}', b"{}", pickle.dumps({}), b"\xff\xfe", b"[" * 99_999]
)
def test_foreign_manifests_are_refused_in_one_line(folder: Path, content: bytes) -> None:
    (folder / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(CorruptFile) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_missing_files_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in FILES:
        partial = tmp_path / f"without-{file}"
        shutil.copytree(folder, partial)
        (partial / file).unlink()
        with pytest.raises(CorruptFile, match=file):
            load(partial)
    with pytest.raises(CorruptFile, match="nowhere"):
        load(tmp_path / "nowhere")


def test_existing_folder_is_kept(manifest: Manifest, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(Conflict, match="already there"):
        save(manifest, manifest.scorer(), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_folder_that_cannot_be_made_is_refused(manifest: Manifest, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be made"):
        save(manifest, manifest.scorer(), folder / MANIFEST_FILE / "policy")


def test_interrupted_save_leaves_nothing(
    manifest: Manifest, scorer: CandidateScorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(manifest, scorer, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_other_knob_spaces_are_refused_by_name(policy: StoredPolicy, sessions: list[Session]) -> None:
    space = knob_space()
    other = dataclasses.replace(space, knobs=space.knobs[1:])
    with pytest.raises(InvalidRequest, match=f"trained for knob space {space.version}, not {other.version}"):
        policy.require(other)
    case = dataclasses.replace(sessions[0].case, space=other, candidates=(other.default,))
    with pytest.raises(InvalidRequest, match="trained for knob space"):
        policy.choose(case, ())


def test_other_features_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    other = dataclasses.replace(manifest, context_features=manifest.context_features[::-1])
    with pytest.raises(InvalidRequest, match="reads other features"):
        save(other, other.scorer(), tmp_path / "policy").require(knob_space())
