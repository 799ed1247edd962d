import importlib
import sys
from pathlib import Path

import pytest

from paceline.runtime.errors import UnknownName
from paceline.runtime.registry import Registry


def plugin(name: str) -> type:
    return type(name.title(), (), {"name": name})


@pytest.fixture
def registry() -> Registry[type]:
    return Registry("codec", package="nowhere", entry_point_group="paceline.tests")


def test_get_returns_what_was_registered(registry: Registry[type]) -> None:
    cls = plugin("topk")
    assert registry.register(cls) is cls
    assert registry.get("topk") is cls


def test_names_are_sorted_whatever_the_order_of_registration(registry: Registry[type]) -> None:
    for name in ("topk", "bf16", "none"):
        registry.register(plugin(name))
    assert registry.names() == ("bf16", "none", "topk")


def test_a_name_belongs_to_one_class(registry: Registry[type]) -> None:
    first = registry.register(plugin("topk"))
    registry.register(first)
    with pytest.raises(ValueError, match="codec 'topk' is already registered by"):
        registry.register(plugin("topk"))
    assert registry.get("topk") is first


def test_unknown_name_proposes_the_nearest(registry: Registry[type]) -> None:
    registry.register(plugin("topk"))
    with pytest.raises(UnknownName, match=r"^unknown codec 'top-k'; did you mean 'topk'\?$"):
        registry.get("top-k")
    with pytest.raises(UnknownName, match=r"^unknown codec 'zzz'; known: topk$"):
        registry.get("zzz")


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed distribution with a plug-in folder `shelf` and an entry point; returns the folder's package."""
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "__init__.py").write_text(
        "from paceline.runtime.registry import Registry\n"
        "SHELF = Registry('thing', package='shelf', entry_point_group='paceline.tests')\n"
    )
    (tmp_path / "shelf" / "inside.py").write_text(
        "from shelf import SHELF\n\n@SHELF.register\nclass Inside:\n    name = 'inside'\n"
    )
    (tmp_path / "outside.py").write_text("class Outside:\n    name = 'outside'\n")
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[paceline.tests]\noutside = outside:Outside\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("shelf", "shelf.inside", "outside"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return "shelf"


def test_load_finds_sibling_files_and_entry_points(third_party: str) -> None:
    shelf = importlib.import_module(third_party).SHELF
    shelf.load()
    shelf.load()
    assert shelf.names() == ("inside", "outside")
