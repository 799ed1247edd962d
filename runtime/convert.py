"""Between domain dataclasses and protobuf messages. Nothing else touches a field of both.

A message has the same field names as its dataclass, so most of the work is structural; knob values, strategies,
domains, intervals and event unions are the exceptions and are spelled out.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from paceline.proto.paceline.v1 import runtime_pb2, types_pb2
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
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import InvalidRequest

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_DOMAINS: dict[str, type[Domain]] = {
    "boolean": Boolean,
    "categorical": Categorical,
    "number": Number,
    "per_rank": PerRank,
    "integers": Integers,
}
_EVENTS: dict[str, type[TrialEvent]] = {
    "started": TrialStarted,
    "step": StepDone,
    "evaluated": Evaluated,
    "snapshot": SnapshotTaken,
    "finished": TrialFinished,
    "failed": TrialFailed,
}


def knob_value_to_message(value: KnobValue) -> types_pb2.KnobValue:
    """Wrap a plain value."""
    if isinstance(value, bool):
        return types_pb2.KnobValue(boolean=value)
    if isinstance(value, int):
        return types_pb2.KnobValue(integer=value)
    if isinstance(value, float):
        return types_pb2.KnobValue(real=value)
    return types_pb2.KnobValue(text=value)


def knob_value_from_message(message: types_pb2.KnobValue) -> KnobValue:
    """Unwrap a value. Raises InvalidRequest when none is set."""
    field = message.WhichOneof("value")
    if field is None:
        raise InvalidRequest("a knob value must set one of boolean, integer, real, text")
    value: KnobValue = getattr(message, field)
    return value


def strategy_to_message(strategy: Mapping[str, KnobValue]) -> types_pb2.Strategy:
    """A strategy, or any part of one, as a message."""
    return types_pb2.Strategy(values={name: knob_value_to_message(value) for name, value in strategy.items()})


def settings_from_message(message: types_pb2.Strategy) -> dict[str, KnobValue]:
    """The settings a client sent, unchecked and possibly incomplete: pass them to `KnobSpace.strategy`."""
    return {name: knob_value_from_message(value) for name, value in message.values.items()}


def event_to_message(event: TrialEvent) -> runtime_pb2.TrialEvent:
    """An event as the one-of that the stream carries."""
    message = runtime_pb2.TrialEvent()
    for field, event_type in _EVENTS.items():
        if isinstance(event, event_type):
            _fill(getattr(message, field), event)
            getattr(message, field).SetInParent()
    return message


def event_from_message(message: runtime_pb2.TrialEvent) -> TrialEvent:
    """The event inside the one-of. Raises InvalidRequest when none is set."""
    field = message.WhichOneof("event")
    if field is None:
        raise InvalidRequest("a trial event of an unknown kind; is the runtime newer than this client?")
    return from_message(getattr(message, field), _EVENTS[field])


def knob_space_from_message(message: types_pb2.KnobSpace) -> KnobSpace:
    """A knob space as DescribeKnobs sends it."""
    return from_message(message, KnobSpace)


def to_message(value: Any, message_type: type[M]) -> M:
    """Convert a domain dataclass to the message with the same field names."""
    message: M = message_type()
    _fill(message, value)
    return message


def _fill(message: Any, value: Any) -> None:
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item is not None:
            _set(message, field.name, item)


def _set(message: Any, name: str, item: Any) -> None:
    if isinstance(item, Strategy):
        getattr(message, name).CopyFrom(strategy_to_message(item))
    elif isinstance(item, Boolean | Categorical | Number | PerRank | Integers):
        field = next(key for key, domain in _DOMAINS.items() if isinstance(item, domain))
        getattr(message.domain, field).SetInParent()
        _fill(getattr(message.domain, field), item)
    elif dataclasses.is_dataclass(item):
        getattr(message, name).SetInParent()
        _fill(getattr(message, name), item)
    elif isinstance(item, dict):
        target = getattr(message, name)
        for key, entry in item.items():
            if target.GetEntryClass().DESCRIPTOR.fields_by_name["value"].message_type:
                target[key].CopyFrom(knob_value_to_message(entry))
            else:
                target[key] = entry
    elif isinstance(item, tuple):
        _set_sequence(message, name, item)
    elif message.DESCRIPTOR.fields_by_name[name].message_type is not None:
        getattr(message, name).CopyFrom(knob_value_to_message(item))
    else:
        setattr(message, name, item)


def _set_sequence(message: Any, name: str, items: tuple[Any, ...]) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    target = getattr(message, name)
    if field.message_type is not None and field.message_type.name == "Interval":
        target.low, target.high = items
        return
    for item in items:
        if field.message_type is None:
            target.append(item)
        elif field.message_type.name == "SampleRange":
            target.add(start=item[0], stop=item[1])
        elif field.message_type.name == "DeviceGroup":
            target.add(devices=item)
        else:
            _fill(target.add(), item)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_message(message: Message, cls: type[T]) -> T:
    """Convert a message to the domain dataclass with the same field names. The dataclass validates itself."""
    hints = _hints(cls)  # type: ignore[arg-type]
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        values[field.name] = _get(message, field.name, hints[field.name])
    return cls(**values)


def _get(message: Any, name: str, hint: Any) -> Any:
    if hint is Domain:
        kind = message.domain.WhichOneof("domain")
        if kind is None:
            raise InvalidRequest("a knob with a domain of an unknown kind; is the runtime newer than this client?")
        return from_message(getattr(message.domain, kind), _DOMAINS[kind])
    if hint == KnobValue:
        return knob_value_from_message(getattr(message, name))
    if isinstance(hint, types.UnionType):
        if not message.HasField(name):
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    value = getattr(message, name)
    origin = typing.get_origin(hint)
    if hint is Strategy:
        value = Strategy.of(settings_from_message(value))
    elif dataclasses.is_dataclass(hint):
        value = from_message(value, hint)  # type: ignore[arg-type]
    elif origin is dict:
        value = {
            key: knob_value_from_message(entry) if isinstance(entry, types_pb2.KnobValue) else entry
            for key, entry in value.items()
        }
    elif origin is tuple:
        value = _get_sequence(value, typing.get_args(hint))
    return value


def _get_sequence(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, types_pb2.Interval):
        return (value.low, value.high)
    element = arguments[0]
    if typing.get_origin(element) is tuple:
        return tuple(
            tuple(item.devices) if isinstance(item, types_pb2.DeviceGroup) else (item.start, item.stop)
            for item in value
        )
    if dataclasses.is_dataclass(element):
        return tuple(from_message(item, element) for item in value)  # type: ignore[arg-type]
    return tuple(value)
