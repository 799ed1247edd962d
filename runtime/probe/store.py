"""Keeps cluster profiles as JSON, each under a fingerprint of what decides what a probe measures."""

import contextlib
import hashlib
import json
import logging
import platform
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.errors import CorruptFile, InvalidRequest
from paceline.runtime.home import home
from paceline.runtime.launch.base import Launcher

PROBE_VERSION = 3
"""Raised when a probe measures something else, or otherwise: what older ones measured is then forgotten."""

_CLUSTER = TypeAdapter(Cluster)

logger = logging.getLogger(__name__)


def profiles_folder() -> Path:
    """Where commands keep profiles."""
    return home() / "clusters"


def fingerprint(launcher: Launcher) -> str:
    """16 hexadecimal digits that change with the cluster, this machine's processor, torch or the probe."""
    parts = [PROBE_VERSION, launcher.fingerprint, _cpu_model(), psutil.cpu_count(), version("torch")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _cpu_model() -> str:
    # On Linux, platform.processor() knows the architecture at most.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def to_json(cluster: Cluster) -> bytes:
    """What `read_cluster` reads."""
    return _CLUSTER.dump_json(cluster, indent=1)


def read_cluster(path: Path) -> Cluster:
    """Read a profile. Raises CorruptFile, or InvalidRequest where there is none."""
    try:
        return _CLUSTER.validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cluster profile {path} cannot be read: {error.strerror}") from None
    except InvalidRequest as error:
        raise CorruptFile(f"{path} is no cluster profile: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptFile(f"{path} is no cluster profile: {where} {first['msg']}") from None


@dataclass(frozen=True)
class ProfileStore:
    """A folder of profiles. Any number of processes may use it at once."""

    folder: Path
    """Made when the first profile is saved."""

    def path(self, launcher: Launcher) -> Path:
        """Where the profile of its cluster is kept."""
        return self.folder / f"{fingerprint(launcher)}.json"

    def load(self, launcher: Launcher) -> Cluster | None:
        """The profile that still holds, if there is one. A file that cannot be read counts as none."""
        if not launcher.keeps_profile:
            return None
        try:
            return read_cluster(self.path(launcher))
        except (InvalidRequest, CorruptFile):
            return None

    def save(self, launcher: Launcher, cluster: Cluster) -> None:
        """Keep a profile, in place of the one before. That it cannot be written stops nobody: it is logged."""
        path = self.path(launcher)
        unfinished = path.with_name(f"{uuid.uuid4().hex}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(to_json(cluster))
            unfinished.replace(path)
        except OSError as error:
            logger.warning("cluster profile %s cannot be kept: %s", path, error.strerror)
            with contextlib.suppress(OSError):
                unfinished.unlink()
