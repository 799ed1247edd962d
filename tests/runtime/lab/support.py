"""What several lab tests need."""

import os
from pathlib import Path

import pytest
import yaml
from pyroute2 import IPRoute, netns

from paceline.runtime.lab.cgroup import find_cgroups
from paceline.runtime.lab.file import LabFile
from paceline.runtime.lab.owner import is_dead, owner_of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces and cgroups")

SMALL = """
name: small
racks:
  - {name: left, uplink: 40 Mbit/s}
  - {name: right, uplink: {up: 20 Mbit/s, down: 80 Mbit/s}}
nodes:
  - {name: a, rack: left, link: 400 Mbit/s, devices: [{speed: 0.4, memory: 512 MiB}, {speed: 0.1}]}
  - {name: b, rack: right, link: 200 Mbit/s, devices: [{speed: 0.4, memory: 512 MiB}]}
  - {name: c, link: {up: 100 Mbit/s, down: 50 Mbit/s}, devices: [{speed: 0.2}]}
"""
PAIR = """
name: pair
racks: [{name: left, uplink: 200 Mbit/s}, {name: right, uplink: 200 Mbit/s}]
nodes:
  - {name: a, rack: left, link: 400 Mbit/s, devices: [{speed: 0.5, memory: 512 MiB}]}
  - {name: b, rack: right, link: 400 Mbit/s, devices: [{speed: 0.5, memory: 512 MiB}]}
"""


def parsed(text: str) -> LabFile:
    """The lab of a YAML text."""
    return LabFile.model_validate(yaml.safe_load(text))


def inventory() -> set[str]:
    """All namespaces, links and cgroups whose name begins with ours, without those of labs in other processes."""
    found = {f"namespace {name}" for name in netns.listnetns()}
    with IPRoute() as ip:
        for link in ip.get_links():
            found.add(f"link {link.get_attr('IFLA_IFALIAS') or link.get_attr('IFLA_IFNAME')}")
    for root in find_cgroups()._roots:
        found |= {f"cgroup {folder.relative_to(root)}" for folder in root.glob("paceline*/**/") if folder.is_dir()}
    return {each for each in found if each.partition(" ")[2].startswith("paceline") and not _elsewhere(each)}


def _elsewhere(thing: str) -> bool:
    owner = owner_of(thing.partition(" ")[2])
    return owner is not None and not is_dead(owner) and int(owner.split("-")[1]) != os.getpid()


def write(folder: Path, text: str) -> Path:
    """A cluster file."""
    path = folder / "lab.yaml"
    path.write_text(text)
    return path
