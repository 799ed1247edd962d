"""Every domain dataclass survives the wire, types included."""

import dataclasses
import json
import types
import typing
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.proto.paceline.v1 import runtime_pb2, types_pb2
from paceline.runtime.convert import (
    event_from_message,
    event_to_message,
    from_message,
    knob_space_from_message,
    knob_value_from_message,
    knob_value_to_message,
    settings_from_message,
    strategy_to_message,
    to_message,
)
from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.domain.domains import Boolean, Categorical, Domain, Integers, KnobValue, Number, PerRank
from paceline.runtime.domain.events import (
    Evaluated,
    SnapshotTaken,
    StepDone,
    TrialEvent,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)
from paceline.runtime.domain.knobs import Knob, KnobSpace, Requirement
from paceline.runtime.domain.snapshot import Snapshot, SnapshotPart
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, HeldOutPoint, StepSplit, TimedChange, Trial, TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import knob_space

counts = st.integers(0, 2**31 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(1e-9, 1e15)
knob_values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | reals | st.text()

DOMAINS: st.SearchStrategy[Domain] = st.one_of(
    st.just(Boolean()),
    st.builds(Categorical, choices=st.lists(st.text(), min_size=1).map(tuple)),
    st.builds(Number, low=st.floats(1, 9), high=st.floats(10, 99), log=st.booleans(), integer=st.booleans()),
    st.builds(PerRank, named=st.lists(st.text()).map(tuple), permutation=st.booleans()),
    st.builds(
        Integers,
        named=st.lists(st.text(), min_size=1).map(tuple),
        low=st.integers(-9, 0),
        high=st.integers(1, 9),
        most=st.integers(1, 9),
        distinct=st.booleans(),
    ),
)

CONSTRAINED: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    DeviceProfile: {
        **dict.fromkeys(("flops", "mem_bw", "net_latency", "pcie_bw", "memory"), positive),
        "codec_rates": st.dictionaries(st.text(), positive, max_size=3),
    },
    Link: dict.fromkeys(("bandwidth", "alone", "latency"), positive),
    TimedChange: {"step": st.integers(1, 2**31), "seconds": st.none()},
    Budget: {"steps": st.integers(1, 2**31), "seconds": st.none() | positive, "target_loss": st.none() | reals},
    TrialSpec: {"evaluations": st.integers(1, 9), "on_worker_lost": st.sampled_from(["replace", "fail"])},
    WorkloadProfile: {
        **dict.fromkeys(
            ("global_batch", "train_samples", "heldout_samples", "parameters", "parameter_tensors"),
            st.integers(1, 2**40),
        ),
        "flops_per_sample": positive,
    },
}
"""Fields whose dataclass refuses some values of their type."""


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """All values of a type that the domain dataclasses use."""
    if hint in UNFOLDED:
        return UNFOLDED[hint]
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        fields = {name: any_of(each) for name, each in typing.get_type_hints(hint).items()}
        return st.builds(hint, **{**fields, **CONSTRAINED.get(hint, {})})
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return st.none() | any_of(next(argument for argument in arguments if argument is not types.NoneType))
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.text(), any_of(arguments[1]), max_size=3)
    if arguments[-1] is Ellipsis:
        return st.lists(any_of(arguments[0]), max_size=3).map(tuple)
    return st.tuples(*map(any_of, arguments))


UNFOLDED: dict[Any, st.SearchStrategy[Any]] = {
    int: counts,
    float: reals,
    str: st.text(),
    bool: st.booleans(),
    KnobValue: knob_values,
    Domain: DOMAINS,
    Strategy: st.dictionaries(st.text(), knob_values, max_size=3).map(Strategy.of),
}


def tiers(size: int) -> st.SearchStrategy[tuple[Tier, ...]]:
    """No tier, or one of up to as many groups as devices."""
    groups = tuple((index,) for index in range(size))
    rates = st.lists(positive, min_size=size, max_size=size).map(tuple)
    return st.just(()) | st.builds(Tier, name=st.text(), groups=st.just(groups), uplinks=rates).map(
        lambda tier: (tier,)
    )


UNFOLDED[Cluster] = st.lists(any_of(Device), min_size=1, max_size=3, unique_by=lambda device: device.name).flatmap(
    lambda devices: st.builds(
        Cluster,
        name=st.text(),
        devices=st.just(tuple(devices)),
        links=st.lists(any_of(Link), max_size=2).map(tuple),
        tiers=tiers(len(devices)),
    )
)

MESSAGES: dict[type, type[Message]] = {
    **{
        cls: getattr(types_pb2, cls.__name__)
        for cls in (
            DeviceProfile, Device, Link, Cluster, WorkloadProfile, Requirement, Knob, KnobSpace, Budget, TrialSpec,
            TimedChange, StepSplit, HeldOutPoint, TrialResult, Trial, SnapshotPart, Snapshot,
        )
    },
    **{
        cls: getattr(runtime_pb2, cls.__name__)
        for cls in (TrialStarted, StepDone, Evaluated, SnapshotTaken, TrialFinished, TrialFailed)
    },
}  # fmt: skip


def over_the_wire(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


def exact(value: Any) -> str:
    """A text that tells 1 from 1.0 and True, whatever the order of dicts."""
    return json.dumps(dataclasses.asdict(value), sort_keys=True)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_dataclass_comes_back_equal(cls: type, data: st.DataObject) -> None:
    value = data.draw(any_of(cls))
    returned: object = from_message(over_the_wire(to_message(value, MESSAGES[cls])), cls)
    assert returned == value
    assert exact(returned) == exact(value)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_message_has_the_fields_of_its_dataclass(cls: type) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    assert {field.name for field in MESSAGES[cls].DESCRIPTOR.fields} == fields


@given(st.one_of(*(any_of(cls) for cls in typing.get_args(TrialEvent))))
def test_every_event_comes_back_as_its_own_kind(event: TrialEvent) -> None:
    returned = event_from_message(over_the_wire(event_to_message(event)))
    assert type(returned) is type(event)
    assert returned == event


def test_an_event_of_default_fields_keeps_its_kind() -> None:
    event = Evaluated(step=0, point=HeldOutPoint(seconds=0.0, samples=0, loss=0.0))
    assert event_from_message(over_the_wire(event_to_message(event))) == event


def test_an_event_of_a_newer_runtime_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is the runtime newer than this client"):
        event_from_message(runtime_pb2.TrialEvent())


@given(knob_values)
def test_knob_values_keep_their_type(value: KnobValue) -> None:
    returned = knob_value_from_message(over_the_wire(knob_value_to_message(value)))
    assert (type(returned), returned) == (type(value), value)


def test_a_knob_value_that_is_not_set_is_refused() -> None:
    message = types_pb2.Strategy()
    message.values["sync.mode"].SetInParent()
    with pytest.raises(InvalidRequest, match="must set one of"):
        settings_from_message(over_the_wire(message))


def test_part_of_a_strategy_stays_a_part() -> None:
    settings: dict[str, KnobValue] = {"sync.mode": "local_sgd", "sync.period": 1, "compress.error_feedback": False}
    assert settings_from_message(over_the_wire(strategy_to_message(settings))) == settings


def test_the_knob_space_of_a_client_has_the_version_of_its_runtime() -> None:
    space = knob_space()
    received = knob_space_from_message(over_the_wire(to_message(space, types_pb2.KnobSpace)))
    assert received == space
    assert received.version == space.version


def test_a_knob_without_a_domain_is_refused() -> None:
    message = to_message(knob_space(), types_pb2.KnobSpace)
    message.knobs[0].ClearField("domain")
    with pytest.raises(InvalidRequest, match="domain"):
        knob_space_from_message(over_the_wire(message))


def test_an_invalid_message_is_refused_by_its_dataclass() -> None:
    with pytest.raises(InvalidRequest, match="a budget needs steps or seconds"):
        from_message(types_pb2.Budget(), Budget)
