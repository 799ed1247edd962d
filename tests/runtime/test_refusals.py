"""What a client may ask for and how it is refused: in process, through the client, and over bare gRPC."""

import dataclasses
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from paceline.proto.paceline.v1 import runtime_pb2, runtime_pb2_grpc
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.client import RuntimeClient
from paceline.runtime.convert import event_from_message
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Conflict, InvalidRequest, NotFound
from tests.runtime.support import (
    DEADLINE_SECONDS,
    RunningTrial,
    Settings,
    digests,
    events_of,
    last_snapshot,
    refusal,
    request_for,
    result_of,
    run,
    spec_for,
)

REFUSED: list[tuple[Settings, dict[str, Any], type[Exception], str]] = [
    ({"sync.mod": "x"}, {}, InvalidRequest, "unknown knob 'sync.mod'; did you mean 'sync.mode'?"),
    (
        {"sync.mode": "local_sgd", "sync.period": 65},
        {},
        InvalidRequest,
        "sync.period=65: must be a whole number from 1 to 64; nearest legal: 64",
    ),
    (
        {"compress.ratio": 0.1},
        {},
        InvalidRequest,
        "compress.ratio=0.1 has no effect with compress.codec=none; "
        "set compress.codec=randomk, or leave compress.ratio at its default 0.05",
    ),
    (
        {"mapping.order": "0,1"},
        {},
        InvalidRequest,
        "mapping.order=0,1: must be scheduler, topology or a permutation of 0..n-1, n = 4; for example 0,1,2,3",
    ),
    (
        {"mapping.batch_share": "1,1,1,1"},
        {"world_size": 3},
        InvalidRequest,
        "mapping.batch_share=1,1,1,1: must be even, proportional or one positive whole number per rank, n = 3; "
        "for example 1,1,1",
    ),
    ({}, {"workload": "regresion"}, InvalidRequest, "unknown workload 'regresion'; did you mean 'regression'?"),
    ({}, {"workload": "pair/x"}, InvalidRequest, "unknown workload 'pair/x'; did you mean 'pair'?"),
    ({}, {"world_size": 5}, InvalidRequest, "world size 5 is larger than cluster local:4; use at most 4"),
    (
        {},
        {"workload": "pair"},
        InvalidRequest,
        "world size 4 is larger than the global batch of 2; use at most 2 ranks",
    ),
    ({}, {"start_snapshot": "1-2-3"}, NotFound, "no snapshot '1-2-3' in STORE; it holds "),
    (
        {},
        {"start_snapshot": "OTHER"},
        InvalidRequest,
        "snapshot OTHER is of workload regression/momentum, not of regression",
    ),
    (
        {},
        {"start_snapshot": "../x"},
        InvalidRequest,
        "snapshot id '../x' must be 1 to 128 letters, digits, '.', '_' or '-'",
    ),
]
STATUS = {InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT, NotFound: grpc.StatusCode.NOT_FOUND}


@pytest.fixture(scope="module")
def places(embedded: EmbeddedRuntime) -> dict[str, str]:
    """What the names in `REFUSED` stand for."""
    events = run(embedded, spec_for(embedded, {}, steps=2, workload="regression/momentum"))
    return {"OTHER": last_snapshot(events).snapshot_id, "STORE": embedded._runtime.store.url}


def filled(places: dict[str, str], text: str) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def refused_spec(runtime: RuntimeAPI, places: dict[str, str], settings: Settings, fields: dict[str, Any]) -> TrialSpec:
    strategy = Strategy.of({**runtime.describe_knobs().default, **settings})
    values = {"workload": "regression", "strategy": strategy, "budget": Budget(steps=5), **fields}
    if "start_snapshot" in fields:
        values["start_snapshot"] = filled(places, fields["start_snapshot"])
    return TrialSpec(**values)


@pytest.mark.parametrize(("settings", "fields", "kind", "message"), REFUSED)
def test_refused_trial_is_told_why_and_is_not_there(
    runtime: RuntimeAPI,
    places: dict[str, str],
    settings: Settings,
    fields: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    before = runtime.list_trials()
    with pytest.raises(kind) as refused:
        run(runtime, refused_spec(runtime, places, settings, fields))
    assert str(refused.value).startswith(filled(places, message))
    assert "\n" not in str(refused.value)
    assert runtime.list_trials() == before


@pytest.mark.parametrize(("settings", "fields", "kind", "message"), REFUSED)
def test_refusals_travel_as_their_status(
    embedded: EmbeddedRuntime,
    stub: runtime_pb2_grpc.RuntimeStub,
    places: dict[str, str],
    settings: Settings,
    fields: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    spec = refused_spec(embedded, places, settings, fields)
    code, details = refusal(lambda: events_of(stub, request_for(spec)))
    assert code is STATUS[kind]
    assert details.startswith(filled(places, message))


def test_refusals_do_not_disturb_the_trial_that_runs(runtime: RuntimeAPI, places: dict[str, str]) -> None:
    spec = spec_for(runtime, {}, steps=150)
    expected = digests(last_snapshot(run(runtime, spec)), "model")
    trial = RunningTrial(runtime, spec)
    trial.wait_for(lambda event: isinstance(event, StepDone))
    for settings, fields, kind, _ in REFUSED:
        with pytest.raises(kind):
            run(runtime, refused_spec(runtime, places, settings, fields))
    assert digests(last_snapshot(trial.wait()), "model") == expected
    assert result_of(trial.events).generations == 1


NO_ID = "request_id must be set; any unique text, for example a UUID"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda stub, spec: events_of(stub, request_for(spec, request_id="")), NO_ID),
        (lambda stub, spec: stub.UpdateStrategy(runtime_pb2.UpdateStrategyRequest(trial_id="x")), NO_ID),
        (lambda stub, spec: stub.Snapshot(runtime_pb2.SnapshotRequest(trial_id="x")), NO_ID),
        (
            lambda stub, spec: events_of(stub, runtime_pb2.RunTrialRequest(request_id="empty")),
            "a budget needs steps or seconds; for example steps=200",
        ),
    ],
)
def test_incomplete_requests_are_invalid(
    embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub, call: Callable[..., object], message: str
) -> None:
    spec = spec_for(embedded, {}, steps=1)
    assert refusal(lambda: call(stub, spec)) == (grpc.StatusCode.INVALID_ARGUMENT, message)


def test_knob_value_that_is_not_set_is_invalid(embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub) -> None:
    request = request_for(spec_for(embedded, {}, steps=1))
    request.spec.strategy.values["sync.mode"].Clear()
    message = "a knob value must set one of boolean, integer, real, text"
    assert refusal(lambda: events_of(stub, request)) == (grpc.StatusCode.INVALID_ARGUMENT, message)


def test_missing_knobs_have_their_defaults(embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub) -> None:
    request = request_for(spec_for(embedded, {}, steps=1))
    request.spec.strategy.Clear()
    *_, last = stub.RunTrial(request, timeout=DEADLINE_SECONDS)
    assert result_of([event_from_message(last)]).strategy == embedded.describe_knobs().default


def test_strategy_of_another_knob_space_is_refused(
    embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub
) -> None:
    version, before = embedded.describe_knobs().version, embedded.list_trials()
    spec = spec_for(embedded, {}, steps=1)
    assert refusal(lambda: events_of(stub, request_for(spec, knob_version="0" * 12))) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the strategy is of knob space 000000000000, this runtime has {version}; describe the knobs again",
    )
    assert embedded.list_trials() == before
    *_, last = stub.RunTrial(request_for(spec, knob_version=version), timeout=DEADLINE_SECONDS)
    assert result_of([event_from_message(last)]).failure is None


def test_client_says_which_knob_space_it_was_built_for(embedded: EmbeddedRuntime, address: str) -> None:
    with RuntimeClient(address) as client:
        spec, version = spec_for(client, {}, steps=1), client.describe_knobs().version
        older = dataclasses.replace(embedded._runtime.space, knobs=embedded._runtime.space.knobs[:-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedded._runtime, "space", older)
            with pytest.raises(Conflict, match=f"of knob space {version}, this runtime has {older.version}; "):
                run(client, spec)
