import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.compress.base import CODECS
from paceline.runtime.domain.domains import (
    Boolean,
    Categorical,
    Domain,
    Integers,
    KnobValue,
    Number,
    PerRank,
    ValueRefused,
)
from paceline.runtime.domain.knobs import Knob, KnobSpace, Requirement, Rule
from paceline.runtime.errors import IllegalStrategy, UnknownName
from paceline.runtime.knobs import KnobConfig, NoKnobs, config_from, field_docs, knob, knob_space, plugin_knobs
from paceline.runtime.precision.base import RECIPES
from paceline.runtime.registry import Registry
from paceline.runtime.sync.base import SYNC_MODES

KINDS: dict[str, Registry[Any]] = {"sync.mode": SYNC_MODES, "compress.codec": CODECS, "precision.compute": RECIPES}
PLUGINS = [
    pytest.param(selector, name, id=f"{selector}={name}")
    for selector, registry in KINDS.items()
    for name in registry.names()
]


def knob_ids(value: Knob) -> str:
    return value.name


@pytest.mark.parametrize(("selector", "name"), PLUGINS)
def test_every_plugin_is_a_choice_and_every_config_field_a_knob(selector: str, name: str) -> None:
    space = knob_space()
    domain = space[selector].domain
    assert isinstance(domain, Categorical)
    assert name in domain.choices
    for field in dataclasses.fields(KINDS[selector].get(name).Config):
        derived = space[field.metadata["knob"]]
        assert (derived.domain, derived.default) == (field.metadata["domain"], field.default)
        assert derived.requires is None or (derived.requires.knob == selector and name in derived.requires.values)


@pytest.mark.parametrize(("selector", "name"), PLUGINS)
def test_the_default_strategy_fills_every_config_with_its_defaults(selector: str, name: str) -> None:
    config = KINDS[selector].get(name).Config
    assert config_from(config, knob_space().default) == config()


def test_the_default_strategy_is_plain_ddp() -> None:
    default = knob_space().strategy({})
    assert default == knob_space().default
    assert default["sync.mode"] == "allreduce"
    assert default["compress.codec"] == "none"
    assert default["precision.compute"] == "fp32"


@pytest.mark.parametrize("declared", knob_space().knobs, ids=knob_ids)
def test_a_knob_is_documented_and_its_default_is_in_canonical_form(declared: Knob) -> None:
    assert declared.doc
    canonical = declared.domain.check(declared.default)
    assert (type(canonical), canonical) == (type(declared.default), declared.default)


@pytest.mark.parametrize("declared", knob_space().knobs, ids=knob_ids)
def test_grid_values_are_legal_readable_from_text_and_within_the_unit_interval(declared: Knob) -> None:
    for value in declared.domain.grid(5):
        assert declared.domain.check(value) == value
        assert declared.domain.parse(str(value)) == value
        assert 0.0 <= declared.domain.unit(value) <= 1.0


def test_equal_spaces_have_equal_versions_whatever_the_docs() -> None:
    space = knob_space()
    reworded = KnobSpace(
        knobs=tuple(dataclasses.replace(each, doc="other") for each in space.knobs),
        rules=tuple(dataclasses.replace(rule, because="other") for rule in space.rules),
    )
    assert reworded.version == space.version


@pytest.mark.parametrize(
    "changes",
    [
        {"default": 16},
        {"domain": Number(low=1, high=128, log=True, integer=True)},
        {"domain": Number(low=1, high=64, integer=True)},
        {"requires": None},
        {"name": "sync.other"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_changes_results_changes_the_version(changes: dict[str, object]) -> None:
    period = Knob(
        name="sync.period",
        doc="Steps.",
        domain=Number(low=1, high=64, log=True, integer=True),
        default=8,
        requires=Requirement(knob="sync.mode", values=("local_sgd",)),
    )
    changed = dataclasses.replace(period, **changes)  # type: ignore[arg-type]
    assert KnobSpace(knobs=(changed,)).version != KnobSpace(knobs=(period,)).version


def test_domains_of_another_kind_with_equal_fields_have_another_version() -> None:
    def version(domain: Domain) -> str:
        return KnobSpace(knobs=(Knob(name="a.b", doc="", domain=domain, default="x"),)).version

    assert version(PerRank(named=("x",), permutation=True)) != version(PerRank(named=("x",), permutation=False))
    assert version(Categorical(choices=("x",))) != version(PerRank(named=("x",), permutation=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync.perod": 8}, r"^unknown knob 'sync\.perod'; did you mean 'sync\.period'\?$"),
        ({"compress.codec": "top-k"}, r"^compress\.codec=top-k: must be one of .*; did you mean 'topk'\?$"),
        ({"compress.ratio": 0.9, "compress.codec": "topk"}, "nearest legal: 0.5$"),
        ({"sync.period": 2.5, "sync.mode": "local_sgd"}, "must be a whole number from 1 to 64; nearest legal: 2$"),
        ({"sync.bucket_mb": float("nan")}, r"^sync\.bucket_mb=nan: must be a number from 0\.25 to 100$"),
        ({"compress.error_feedback": 1}, "must be true or false$"),
        (
            {"sync.period": 4},
            r"^sync\.period=4 has no effect with sync\.mode=allreduce; "
            r"set sync\.mode=diloco, or leave sync\.period at its default 8$",
        ),
        ({"compress.ratio": 0.01, "compress.codec": "fp16"}, r"set compress\.codec=randomk"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_illegal_settings_are_refused_in_one_line(settings: dict[str, KnobValue], message: str) -> None:
    assert not knob_space().is_legal(settings)
    with pytest.raises((UnknownName, IllegalStrategy), match=message) as refused:
        knob_space().strategy(settings)
    assert "\n" not in str(refused.value)


def test_a_knob_not_in_use_may_be_named_at_its_default() -> None:
    assert knob_space().strategy({"sync.period": 8}) == knob_space().default


def test_settings_are_read_from_text() -> None:
    assert knob_space().parse(
        [
            "sync.mode=local_sgd",
            "sync.period=4",
            "compress.codec=topk",
            "compress.ratio=1e-2",
            "compress.error_feedback=off",
            "mapping.order=1,0",
        ]
    ) == {
        "sync.mode": "local_sgd",
        "sync.period": 4,
        "compress.codec": "topk",
        "compress.ratio": 0.01,
        "compress.error_feedback": False,
        "mapping.order": "1,0",
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sync.mode", "must be written KNOB=VALUE"),
        ("sync.period=8", r"^sync\.period=8 has no effect with sync\.mode=allreduce; set sync\.mode=diloco"),
        ("sync.period=soon", r"^sync\.period=soon: must be a whole number from 1 to 64$"),
        ("sync.mdoe=allreduce", r"did you mean 'sync\.mode'\?"),
        ("compress.error_feedback=maybe", "must be true or false"),
        ("sync.bucket_mb=inf", "must be a number from 0.25 to 100"),
    ],
)
def test_text_that_is_no_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises((UnknownName, IllegalStrategy), match=message):
        knob_space().parse([setting])


def test_per_rank_lists_are_made_canonical_and_must_fit_the_world_size() -> None:
    space = knob_space()
    strategy = space.strategy({"mapping.order": " 2, 0,1", "mapping.batch_share": "03,1,1"}, world_size=3)
    assert strategy["mapping.order"] == "2,0,1"
    assert strategy["mapping.batch_share"] == "3,1,1"
    for settings in (
        {"mapping.order": "0,1"},
        {"mapping.order": "0,1,1"},
        {"mapping.order": "1,2,3"},
        {"mapping.batch_share": "1,1"},
        {"mapping.batch_share": "1,0,1"},
        {"mapping.batch_share": "1,,1"},
    ):
        with pytest.raises(IllegalStrategy, match=r"n = 3; for example (0,1,2|1,1,1)$"):
            space.strategy(settings, world_size=3)
    with pytest.raises(IllegalStrategy, match=r"did you mean 'scheduler'\?"):
        space.strategy({"mapping.order": "schedular"})


def test_strategies_are_values() -> None:
    space = knob_space()
    one = space.strategy({"sync.mode": "local_sgd", "sync.period": 4})
    two = space.strategy({"sync.period": 4, "sync.mode": "local_sgd"})
    assert one == two
    assert hash(one) == hash(two)
    assert one.describe(space.default) == "sync.mode=local_sgd sync.period=4"
    assert space.default.describe(space.default) == "default"


@given(
    low=st.floats(0.01, 10),
    width=st.floats(1, 1000),
    log=st.booleans(),
    integer=st.booleans(),
    value=st.floats(-1e6, 1e6),
)
def test_the_nearest_legal_number_that_a_refusal_names_is_legal(
    low: float, width: float, log: bool, integer: bool, value: float
) -> None:
    bounds = (round(low) + 1, round(low + width) + 2) if integer else (low, low + width)
    domain = Number(low=bounds[0], high=bounds[1], log=log, integer=integer)
    try:
        accepted = domain.check(value)
    except ValueRefused as refused:
        _, _, nearest = str(refused).partition("nearest legal: ")
        legal = float(domain.parse(nearest) if integer else nearest)
        assert bounds[0] * (1 - 1e-5) <= legal <= bounds[1] * (1 + 1e-5)
    else:
        assert accepted == value
        assert isinstance(accepted, int if integer else float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared(KnobConfig):
    """A config with one knob."""

    depth: int = knob("test.depth", Number(low=1, high=9, integer=True), default=3)
    """How deep, in
    steps, 1 to 9."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extended(Shared):
    """A config that adds one."""

    exact: bool = knob("test.exact", Boolean(), default=False)
    """Whether exact."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contradicting(KnobConfig):
    """A config that declares the same knob with another default."""

    depth: int = knob("test.depth", Number(low=1, high=9, integer=True), default=4)
    """How deep."""


def registry_of(**configs: type[KnobConfig]) -> Registry[type]:
    registry: Registry[type] = Registry("kind", package="nowhere", entry_point_group="paceline.tests")
    for name, config in configs.items():
        registry.register(type(name, (), {"name": name, "Config": config}))
    return registry


def test_field_docs_are_one_line_each_and_inherited() -> None:
    assert field_docs(Extended) == {"depth": "How deep, in steps, 1 to 9.", "exact": "Whether exact."}
    assert field_docs(NoKnobs) == {}


def test_a_knob_is_in_use_with_the_plugins_that_declare_it() -> None:
    requires = {
        found.name: found.requires
        for found in plugin_knobs(registry_of(a=Shared, b=Extended, c=NoKnobs), selector="test.kind")
    }
    assert requires == {
        "test.depth": Requirement(knob="test.kind", values=("a", "b")),
        "test.exact": Requirement(knob="test.kind", values=("b",)),
    }


def test_a_knob_of_every_plugin_is_always_in_use() -> None:
    found = plugin_knobs(registry_of(a=Shared, b=Shared), selector="test.kind")
    assert [each.requires for each in found] == [None]


def test_plugins_must_agree_on_a_knob_they_share() -> None:
    with pytest.raises(ValueError, match=r"b declares test\.depth differently from a"):
        plugin_knobs(registry_of(a=Shared, b=Contradicting), selector="test.kind")


def test_a_config_checks_its_fields() -> None:
    assert config_from(Extended, {"test.depth": 5, "test.exact": True, "other": 1}) == Extended(depth=5, exact=True)
    with pytest.raises(IllegalStrategy, match=r"^test\.depth=12: .*nearest legal: 9$"):
        Extended(depth=12)


def test_values_that_do_not_go_together_are_refused_with_the_reason_and_a_legal_value() -> None:
    mode, codec = (
        Knob(name=name, doc="", domain=Categorical(choices=("a", "b", "c")), default="a")
        for name in ("x.mode", "x.codec")
    )
    rule = Rule(knob="x.codec", values=("b",), other="x.mode", allowed=("a", "b"), because="it was never tried")
    space = KnobSpace(knobs=(codec, mode), rules=(rule,))
    assert space.is_legal({"x.codec": "b", "x.mode": "b"})
    assert space.is_legal({"x.codec": "c", "x.mode": "c"})
    refused = "^x.mode=c does not go with x.codec=b, because it was never tried; set x.mode=a$"
    with pytest.raises(IllegalStrategy, match=refused):
        space.strategy({"x.codec": "b", "x.mode": "c"})
    assert space.version != KnobSpace(knobs=(codec, mode)).version


def test_rules_name_knobs_and_values_that_exist_and_spare_the_default() -> None:
    space = knob_space()
    for rule in space.rules:
        for name, values in ((rule.knob, rule.values), (rule.other, rule.allowed)):
            assert all(space[name].domain.check(value) == value for value in values)
        assert rule.permits(space.default)


FEW = Integers(named=("beside",), low=0, high=9, most=3, distinct=True)


@pytest.mark.parametrize(("text", "value"), [("beside", "beside"), (" 3, 1", "3,1"), ("9", "9")])
def test_a_few_integers_are_read_into_canonical_form(text: str, value: str) -> None:
    assert FEW.parse(text) == FEW.check(value) == value


@pytest.mark.parametrize("text", ["", "1,1", "1,2,3,4", "-1", "10", "1.5", "one"])
def test_integers_outside_the_domain_are_refused_with_the_rule(text: str) -> None:
    rule = "^must be beside or at most 3 different whole numbers from 0 to 9; for example 0,1$"
    with pytest.raises(ValueRefused, match=rule):
        FEW.parse(text)
    with pytest.raises(ValueRefused, match="did you mean 'beside'"):
        FEW.parse("besides")
