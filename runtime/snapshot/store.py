"""Where snapshots are kept: content-addressed objects and the manifests that refer to them."""

import contextlib
import difflib
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fsspec.core
import safetensors
import safetensors.torch
import torch
import zstandard
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.errors import CorruptFile, InvalidRequest, NotFound

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SNAPSHOT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """The content of a manifest file."""

    sha256: str
    """Of the snapshot's JSON, hex: JSON has no checksum of its own."""
    snapshot: Snapshot
    """What the file is about."""


_MANIFEST = TypeAdapter(_Manifest)
_SNAPSHOT = TypeAdapter(Snapshot)


class SnapshotStore:
    """A folder on any fsspec file system, written by any number of processes at once.

    `objects/<2 hex>/<digest>.zst` holds one object as a zstd frame with its size and checksum; the digest is
    the SHA-256 of the uncompressed content, so equal content is kept once. `manifests/<snapshot_id>.json`
    makes a set of objects a snapshot. Files appear under their name complete or not at all.
    """

    def __init__(self, url: str) -> None:
        """Open the store at a path or fsspec URL and make its folders; raises InvalidRequest if it cannot."""
        self.url = url
        try:
            # Listings are never cached: other processes write to the store.
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            for folder in ("objects", "manifests"):
                self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
        except (ImportError, OSError, ValueError) as error:
            raise InvalidRequest(f"cannot keep snapshots at {url!r}: {error}; use a writable folder") from error

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        """Keep named tensors of any dtype, device and layout; returns digest and uncompressed bytes."""
        # Copies, because safetensors refuses tensors that are strided or share a storage.
        copies = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        return self._put(safetensors.torch.save(copies))

    def put_json(self, document: Any) -> tuple[str, int]:
        """Keep a JSON document of finite numbers; returns digest and uncompressed bytes."""
        return self._put(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())

    def get_tensors(self, digest: str) -> dict[str, Tensor]:
        """The tensors of an object, on the CPU. Raises NotFound or CorruptFile."""
        try:
            return safetensors.torch.load(self._get(digest))
        except safetensors.SafetensorError as error:
            raise CorruptFile(f"object {digest} of {self.url} holds no tensors: {error}") from error

    def get_json(self, digest: str) -> Any:
        """The document of an object. Raises NotFound or CorruptFile."""
        try:
            return json.loads(self._get(digest))
        except ValueError as error:
            raise CorruptFile(f"object {digest} of {self.url} holds no JSON: {error}") from error

    def commit(self, snapshot: Snapshot) -> None:
        """Write the manifest, which makes the snapshot exist.

        Raises InvalidRequest when the id is no plain file name and NotFound when a part is not in the store.
        """
        path = self._manifest_path(snapshot.snapshot_id)
        for part in snapshot.parts:
            if not self._fs.exists(self._object_path(part.digest)):
                raise NotFound(
                    f"snapshot {snapshot.snapshot_id}: {part.name} of rank {part.rank} (object "
                    f"{part.digest}) is not in {self.url}; put every part before the commit"
                )
        manifest = _Manifest(sha256=_snapshot_digest(snapshot), snapshot=snapshot)
        self._write(path, _MANIFEST.dump_json(manifest))

    def load(self, snapshot_id: str) -> Snapshot:
        """The manifest of a snapshot. Raises NotFound with the nearest id, or CorruptFile."""
        try:
            content = self._fs.cat_file(self._manifest_path(snapshot_id))
        except FileNotFoundError:
            raise NotFound(self._unknown(snapshot_id)) from None
        try:
            manifest = _MANIFEST.validate_json(content)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise CorruptFile(f"manifest of {snapshot_id} in {self.url} is unreadable: {problem}") from error
        snapshot = manifest.snapshot
        if snapshot.snapshot_id != snapshot_id or manifest.sha256 != _snapshot_digest(snapshot):
            raise CorruptFile(f"manifest of {snapshot_id} in {self.url} was altered; its checksum differs")
        return snapshot

    def ids(self) -> tuple[str, ...]:
        """The snapshots of the store, sorted by id."""
        names = (path.rpartition("/")[2] for path in self._fs.ls(f"{self._root}/manifests", detail=False))
        return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))

    def remove(self, snapshot_id: str) -> None:
        """Delete a snapshot and the objects that no other refers to.

        Raises as `load` does, before anything is deleted. Only the process that commits may call it: an
        object that was put for a snapshot not yet committed may go too, and that commit is then refused.
        """
        own = {part.digest for part in self.load(snapshot_id).parts}
        others = [self.load(other) for other in self.ids() if other != snapshot_id]
        shared = {part.digest for other in others for part in other.parts}
        self._fs.rm_file(self._manifest_path(snapshot_id))
        for digest in own - shared:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._object_path(digest))

    def _put(self, content: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(content).hexdigest()
        path = self._object_path(digest)
        if not self._fs.exists(path):
            compressor = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)
            self._write(path, compressor.compress(content))
        return digest, len(content)

    def _get(self, digest: str) -> bytes:
        try:
            frame = self._fs.cat_file(self._object_path(digest))
        except FileNotFoundError:
            raise NotFound(f"object {digest} is not in {self.url}") from None
        try:
            content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as error:
            raise CorruptFile(f"object {digest} of {self.url} is truncated or altered: {error}") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise CorruptFile(f"object {digest} of {self.url} was altered; its content has another digest")
        return content

    def _write(self, path: str, content: bytes) -> None:
        folder, _, name = path.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}"
        self._fs.pipe_file(temporary, content)
        self._fs.mv(temporary, path)

    def _object_path(self, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise CorruptFile(f"{digest!r} is no object of {self.url}; a digest has 64 hex digits")
        return f"{self._root}/objects/{digest[:2]}/{digest}.zst"

    def _manifest_path(self, snapshot_id: str) -> str:
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise InvalidRequest(f"snapshot id {snapshot_id!r} must be 1 to 128 letters, digits, '.', '_' or '-'")
        return f"{self._root}/manifests/{snapshot_id}.json"

    def _unknown(self, snapshot_id: str) -> str:
        known = self.ids()
        near = difflib.get_close_matches(snapshot_id, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"it holds {len(known)} snapshots"
        return f"no snapshot {snapshot_id!r} in {self.url}; {hint}"


def _snapshot_digest(snapshot: Snapshot) -> str:
    return hashlib.sha256(_SNAPSHOT.dump_json(snapshot)).hexdigest()
