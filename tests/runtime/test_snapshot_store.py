import dataclasses
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from paceline.runtime.domain.snapshot import Snapshot, SnapshotPart
from paceline.runtime.errors import CorruptFile, InvalidRequest, NotFound
from paceline.runtime.snapshot import SnapshotStore

WEIGHTS = {"weight": torch.arange(600.0).view(20, 30), "bias": torch.ones(30)}


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(str(tmp_path))


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> SnapshotStore:
    """One store for all examples of a property test."""
    return SnapshotStore(str(tmp_path_factory.mktemp("store")))


def snapshot_of(store: SnapshotStore, snapshot_id: str, *tensors: dict[str, Tensor]) -> Snapshot:
    parts = []
    for rank, group in enumerate(tensors):
        digest, size = store.put_tensors(group)
        parts.append(SnapshotPart(rank=rank, name="model", digest=digest, size=size))
    return Snapshot(
        snapshot_id=snapshot_id,
        trial_id="trial-1",
        workload="bytes-lm/tiny",
        step=7,
        cursor=224,
        world_size=len(tensors),
        seed=3,
        strategy={"sync.mode": "local_sgd", "sync.period": 1, "compress.ratio": 1.0, "compress.error_feedback": True},
        parts=tuple(parts),
    )


def files(store: SnapshotStore) -> set[str]:
    return {path.relative_to(store.url).as_posix() for path in Path(store.url).rglob("*") if path.is_file()}


def object_file(store: SnapshotStore, digest: str) -> Path:
    return Path(store.url, "objects", digest[:2], f"{digest}.zst")


def bits(tensor: Tensor) -> bytes:
    # NumPy has no bfloat16.
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy().tobytes()


def tensors_of(dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    if dtype is torch.bool:
        elements: np.dtype[Any] = np.dtype(np.bool_)
    elif dtype.is_floating_point:
        elements = np.dtype(np.float32)
    else:
        elements = np.dtype(np.int64)
    return hnp.arrays(elements, shapes).map(lambda array: torch.from_numpy(np.array(array)).to(dtype))


DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@given(st.dictionaries(st.text(), st.sampled_from(DTYPES).flatmap(tensors_of), max_size=4))
def test_tensors_come_back_bit_for_bit(shared_store: SnapshotStore, tensors: dict[str, Tensor]) -> None:
    digest, _ = shared_store.put_tensors(tensors)
    restored = shared_store.get_tensors(digest)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert restored[name].dtype == tensor.dtype
        assert restored[name].shape == tensor.shape
        assert bits(restored[name]) == bits(tensor)


json_documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_documents)
def test_documents_come_back_equal(shared_store: SnapshotStore, document: object) -> None:
    digest, size = shared_store.put_json(document)
    assert shared_store.get_json(digest) == document
    assert size == len(json.dumps(document, separators=(",", ":")))


def test_views_and_tied_tensors_are_stored_by_value(store: SnapshotStore) -> None:
    flat = torch.arange(12.0)
    tensors = {"transposed": flat.view(3, 4).t(), "strided": flat[::2], "tied": flat, "to": flat}
    restored = store.get_tensors(store.put_tensors(tensors)[0])
    for name, tensor in tensors.items():
        assert torch.equal(restored[name], tensor)
    restored["tied"].zero_()
    assert torch.equal(restored["to"], flat)


def test_the_digest_depends_on_the_content_alone(store: SnapshotStore) -> None:
    digest, size = store.put_tensors(WEIGHTS)
    reordered = {name: WEIGHTS[name].clone() for name in reversed(WEIGHTS)}
    assert store.put_tensors(reordered) == (digest, size)
    assert store.put_tensors({**WEIGHTS, "bias": torch.zeros(30)})[0] != digest
    assert store.put_json({"a": 1, "b": [2.5]}) == store.put_json({"b": [2.5], "a": 1})


def test_equal_content_is_kept_once_under_its_sha256(store: SnapshotStore) -> None:
    store.put_json([1, 2])
    digest, size = store.put_json([1, 2])
    assert (digest, size) == (hashlib.sha256(b"[1,2]").hexdigest(), 5)
    assert files(store) == {f"objects/{digest[:2]}/{digest}.zst"}


def test_numbers_that_json_does_not_have_are_refused(store: SnapshotStore) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.put_json({"loss": float("nan")})
    assert files(store) == set()


def test_a_committed_snapshot_is_loaded_as_it_was(store: SnapshotStore) -> None:
    snapshot = snapshot_of(store, "trial-1.step-7", WEIGHTS, {"bias": torch.zeros(3)})
    store.commit(snapshot)
    loaded = SnapshotStore(store.url).load("trial-1.step-7")
    assert loaded == snapshot
    assert [type(value) for value in loaded.strategy.values()] == [str, int, float, bool]
    assert store.ids() == ("trial-1.step-7",)


def test_a_snapshot_does_not_exist_before_all_its_parts_do(store: SnapshotStore) -> None:
    snapshot = snapshot_of(store, "early", WEIGHTS)
    missing = SnapshotPart(rank=1, name="optimizer", digest="ab" * 32, size=1)
    with pytest.raises(NotFound, match=r"^snapshot early: optimizer of rank 1 .* put every part before the commit$"):
        store.commit(dataclasses.replace(snapshot, parts=(*snapshot.parts, missing)))
    assert store.ids() == ()
    assert all(name.startswith("objects/") for name in files(store))


def test_an_unknown_snapshot_proposes_the_nearest(store: SnapshotStore) -> None:
    with pytest.raises(NotFound, match=r"no snapshot 'trial-1' in .*; it holds 0 snapshots"):
        store.load("trial-1")
    store.commit(snapshot_of(store, "trial-17", WEIGHTS))
    with pytest.raises(NotFound, match=r"no snapshot 'trial-71' in .*; did you mean 'trial-17'\?"):
        store.load("trial-71")


@pytest.mark.parametrize("snapshot_id", ["", ".", "../up", "a/b", "/etc/passwd", "a\nb", "a\x00", "-" * 200, ".hidden"])
def test_an_id_never_leaves_the_folder(store: SnapshotStore, snapshot_id: str) -> None:
    snapshot = dataclasses.replace(snapshot_of(store, "fine"), snapshot_id=snapshot_id)
    for refused in (lambda: store.load(snapshot_id), lambda: store.commit(snapshot), lambda: store.remove(snapshot_id)):
        with pytest.raises(InvalidRequest, match="must be 1 to 128 letters"):
            refused()
    assert files(store) == set()


@pytest.mark.parametrize("digest", ["", "../../manifests/x", "AB" * 32, "ab" * 31, "ab" * 32 + "\n"])
def test_a_digest_never_leaves_the_folder(store: SnapshotStore, digest: str) -> None:
    for get in (store.get_json, store.get_tensors):
        with pytest.raises(CorruptFile, match="a digest has 64 hex digits"):
            get(digest)


def test_a_missing_object_is_named(store: SnapshotStore) -> None:
    with pytest.raises(NotFound, match=r"object abab.* is not in"):
        store.get_tensors("ab" * 32)


def test_an_object_of_another_kind_is_named(store: SnapshotStore) -> None:
    document, _ = store.put_json({"a": 1})
    tensors, _ = store.put_tensors(WEIGHTS)
    with pytest.raises(CorruptFile, match=f"object {document} .* holds no tensors"):
        store.get_tensors(document)
    with pytest.raises(CorruptFile, match=f"object {tensors} .* holds no JSON"):
        store.get_json(tensors)


def test_a_truncated_object_is_named(store: SnapshotStore) -> None:
    digest, _ = store.put_tensors(WEIGHTS)
    path = object_file(store, digest)
    frame = path.read_bytes()
    for length in range(0, len(frame), 7):
        path.write_bytes(frame[:length])
        with pytest.raises(CorruptFile, match=f"object {digest} .* is truncated or altered"):
            store.get_tensors(digest)
    path.write_bytes(frame + b"\0")
    with pytest.raises(CorruptFile, match=digest):
        store.get_tensors(digest)


@given(st.data())
def test_an_altered_object_never_yields_other_content(shared_store: SnapshotStore, data: st.DataObject) -> None:
    digest, _ = shared_store.put_tensors(WEIGHTS)
    path = object_file(shared_store, digest)
    frame = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    altered = frame.copy()
    altered[bit // 8] ^= 1 << bit % 8
    path.write_bytes(altered)
    try:
        restored = shared_store.get_tensors(digest)
    except CorruptFile:
        pass
    else:
        assert all(torch.equal(restored[name], WEIGHTS[name]) for name in WEIGHTS)
    finally:
        path.write_bytes(frame)


def test_an_object_swapped_for_another_is_noticed(store: SnapshotStore) -> None:
    one, _ = store.put_json(1)
    two, _ = store.put_json(2)
    object_file(store, one).write_bytes(object_file(store, two).read_bytes())
    with pytest.raises(CorruptFile, match="its content has another digest"):
        store.get_json(one)


@given(st.data())
def test_an_altered_manifest_is_never_another_snapshot(shared_store: SnapshotStore, data: st.DataObject) -> None:
    snapshot = snapshot_of(shared_store, "m", WEIGHTS)
    shared_store.commit(snapshot)
    path = Path(shared_store.url, "manifests", "m.json")
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"manifest of m in .*"):
        shared_store.load("m")
    path.write_bytes(content[: bit // 8])
    with pytest.raises(CorruptFile, match=r"manifest of m in .* is unreadable"):
        shared_store.load("m")


def test_a_manifest_under_another_name_is_noticed(store: SnapshotStore) -> None:
    store.commit(snapshot_of(store, "one", WEIGHTS))
    manifests = Path(store.url, "manifests")
    (manifests / "two.json").write_bytes((manifests / "one.json").read_bytes())
    with pytest.raises(CorruptFile, match="manifest of two"):
        store.load("two")


def test_removing_keeps_what_another_snapshot_refers_to(store: SnapshotStore) -> None:
    own = {"weight": torch.zeros(5)}
    store.commit(snapshot_of(store, "one", WEIGHTS, own))
    store.commit(snapshot_of(store, "two", WEIGHTS))
    alone, _ = store.put_tensors(own)
    store.remove("one")
    assert store.ids() == ("two",)
    assert not object_file(store, alone).exists()
    assert torch.equal(store.get_tensors(store.load("two").parts[0].digest)["weight"], WEIGHTS["weight"])
    store.remove("two")
    assert files(store) == set()
    with pytest.raises(NotFound):
        store.remove("two")


def test_nothing_is_removed_while_another_manifest_cannot_be_read(store: SnapshotStore) -> None:
    for snapshot_id in ("one", "two"):
        store.commit(snapshot_of(store, snapshot_id, WEIGHTS))
    Path(store.url, "manifests", "two.json").write_text("{}")
    before = files(store)
    with pytest.raises(CorruptFile, match="manifest of two"):
        store.remove("one")
    assert files(store) == before


def test_writers_do_not_disturb_each_other(store: SnapshotStore) -> None:
    writers, steps = 8, 20
    barrier = Barrier(writers, timeout=30)

    def write(rank: int) -> None:
        own = SnapshotStore(store.url)
        for step in range(steps):
            common, private = {"w": torch.full((9999,), float(step))}, {"r": torch.tensor(rank)}
            barrier.wait()
            own.commit(snapshot_of(own, f"r{rank}-s{step}", common, private))

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    assert len(store.ids()) == steps * writers
    for snapshot_id in store.ids():
        for part in store.load(snapshot_id).parts:
            store.get_tensors(part.digest)
    assert len(files(store)) == steps * writers + steps + writers


def test_any_fsspec_url_will_do() -> None:
    store = SnapshotStore("memory://bucket/snapshots")
    store.commit(snapshot_of(store, "one", WEIGHTS))
    digest = SnapshotStore("memory://bucket/snapshots").load("one").parts[0].digest
    assert torch.equal(store.get_tensors(digest)["weight"], WEIGHTS["weight"])
    store.remove("one")
    assert store.ids() == ()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in (str(tmp_path / "file"), "nowhere://x"):
        with pytest.raises(InvalidRequest, match=r"cannot keep snapshots at .*; use a writable folder"):
            SnapshotStore(url)
