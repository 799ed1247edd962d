"""What a client may ask for and how it is refused: in process, through the client, and over bare gRPC."""

import contextlib
import dataclasses
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.proto.paceline.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2
from paceline.runtime import workloads
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.client import RuntimeClient
from paceline.runtime.convert import event_from_message, to_message
from paceline.runtime.domain.events import StepDone, TrialFailed, TrialStarted
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Busy, Conflict, InvalidRequest, NotFound, Unreachable
from paceline.runtime.rpc import MESSAGE_LIMIT, SERVER_OPTIONS
from tests.runtime.conftest import MAX_STREAMS
from tests.runtime.support import (
    DEADLINE_SECONDS,
    OnEvent,
    RunningTrial,
    Settings,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
)

FOREVER = 10**9
ANY_SPEC = TrialSpec(workload="regression", strategy=Strategy.of({}), budget=Budget(steps=1))


def endless(runtime: RuntimeAPI, **fields: object) -> TrialSpec:
    """A trial that runs until somebody ends it."""
    return spec_for(runtime, {}, steps=FOREVER, snapshot_every=0, **fields)


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> runtime_pb2_grpc.RuntimeStub:
    return runtime_pb2_grpc.RuntimeStub(channel)


# Descriptions


def test_descriptions_are_the_same_by_both_faces(embedded: EmbeddedRuntime, address: str) -> None:
    with RuntimeClient(address) as client:
        assert client.describe_knobs() == embedded.describe_knobs()
        assert client.describe_cluster() == embedded.describe_cluster()
        assert client.list_workloads() == embedded.list_workloads()
        assert {profile.name for profile in client.list_workloads()} == set(workloads.references())


def test_trial_is_listed_and_described_from_its_acceptance_to_its_result(runtime: RuntimeAPI) -> None:
    known = runtime.list_trials()
    spec = endless(runtime)
    trial = RunningTrial(runtime, spec, request_id=uuid.uuid4().hex)
    trial.wait_for(lambda event: isinstance(event, StepDone))
    (*before, running) = runtime.list_trials()
    assert [each.trial_id for each in before] == [each.trial_id for each in known]
    assert (running.trial_id, running.state, running.spec, running.result) == (trial.trial_id, "running", spec, None)
    assert running.generation == next(e.generation for e in trial.events if isinstance(e, TrialStarted))
    runtime.cancel_trial(trial.trial_id)
    result = result_of(trial.wait())
    described = runtime.get_trial(trial.trial_id)
    assert (described.state, described.result) == ("failed", result)
    assert described.step >= result.steps


def test_unknown_trial_is_not_found(runtime: RuntimeAPI) -> None:
    for call in (runtime.get_trial, runtime.cancel_trial, runtime.snapshot):
        with pytest.raises(NotFound, match=r"^no trial 'nothing' on this runtime; list_trials names \d+$"):
            call("nothing")


# Running, attaching, queueing, cancelling


def test_same_request_attaches_to_the_first_trial(embedded: EmbeddedRuntime, address: str) -> None:
    with RuntimeClient(address) as client:
        request_id = uuid.uuid4().hex
        spec = spec_for(embedded, {}, steps=30)
        first = RunningTrial(embedded, spec, request_id=request_id)
        second = RunningTrial(client, spec, request_id=request_id)
        assert second.wait() == first.wait()
        assert list(client.run_trial(spec, request_id=request_id)) == first.events
        assert [trial.request_id for trial in client.list_trials()].count(request_id) == 1


def test_trial_goes_on_while_anybody_listens(embedded: EmbeddedRuntime, address: str) -> None:
    request_id = uuid.uuid4().hex
    spec = endless(embedded)
    staying = RunningTrial(embedded, spec, request_id=request_id)
    staying.wait_for(lambda event: isinstance(event, StepDone))
    with RuntimeClient(address) as client:
        leaving = client.run_trial(spec, request_id=request_id)
        next(leaving)
        leaving.close()
        with RuntimeClient(address) as other:
            again = other.run_trial(spec, request_id=request_id)
            next(again)
            generation = embedded.update_strategy(staying.trial_id, embedded.describe_knobs().default)
            staying.wait_for_steps(generation)
            again.close()
    embedded.cancel_trial(staying.trial_id)
    assert result_of(staying.wait()).failure == "cancelled"


def test_last_listener_that_leaves_cancels(runtime: RuntimeAPI) -> None:
    events = runtime.run_trial(endless(runtime), request_id=uuid.uuid4().hex)
    started = next(events)
    assert isinstance(started, TrialStarted)
    events.close()
    # The queue is served in order, so this one starts when that one has ended.
    run(runtime, spec_for(runtime, {}, steps=1))
    result = runtime.get_trial(started.trial_id).result
    assert result is not None
    assert (result.failure, result.message) == ("cancelled", "cancelled by a client")


def test_cancelling_ends_a_trial_at_a_step_and_may_be_repeated(runtime: RuntimeAPI) -> None:
    trial = RunningTrial(runtime, endless(runtime))
    trial.wait_for(lambda event: isinstance(event, StepDone))
    for _ in range(3):
        runtime.cancel_trial(trial.trial_id)
    events = trial.wait()
    runtime.cancel_trial(trial.trial_id)
    result = result_of(events)
    assert isinstance(events[-1], TrialFailed)
    assert result.failure == "cancelled"
    assert result.steps == sum(isinstance(event, StepDone) for event in events)
    assert runtime.get_trial(trial.trial_id).result == result


def listed(runtime: RuntimeAPI, request_id: str) -> str:
    """The id of a trial that was accepted, as its queued stream has no event that would tell."""
    return next(trial.trial_id for trial in runtime.list_trials() if trial.request_id == request_id)


@pytest.fixture
def accepted(embedded: EmbeddedRuntime, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Waits until the trial of a request has been accepted."""
    submit, done = embedded._runtime.submit, threading.Condition()
    seen: set[str] = set()

    async def noticed(spec: TrialSpec, request_id: str) -> object:
        entry = await submit(spec, request_id)
        with done:
            seen.add(request_id)
            done.notify_all()
        return entry

    monkeypatch.setattr(embedded._runtime, "submit", noticed)

    def wait(request_id: str) -> None:
        with done:
            assert done.wait_for(lambda: request_id in seen, timeout=DEADLINE_SECONDS)

    return wait


def test_trials_run_one_at_a_time_in_the_order_of_their_acceptance(
    runtime: RuntimeAPI, accepted: Callable[[str], None], on_event: OnEvent
) -> None:
    order: list[tuple[str, str]] = []
    on_event(lambda runner, event: order.append((runner.trial_id, type(event).__name__)))
    requests = [uuid.uuid4().hex for _ in range(4)]
    trials = [RunningTrial(runtime, endless(runtime), request_id=requests[0])]
    first = trials[0].trial_id
    for request_id in requests[1:]:
        trials.append(RunningTrial(runtime, spec_for(runtime, {}, steps=3), request_id=request_id))
        accepted(request_id)
    ids = [listed(runtime, request_id) for request_id in requests]
    assert [runtime.get_trial(each).state for each in ids] == ["running", "queued", "queued", "queued"]
    runtime.cancel_trial(first)
    for trial in trials:
        trial.wait()
    assert [trial_id for trial_id, _ in order if trial_id in ids] == [
        trial_id for trial_id in ids for _ in range(len([each for each, _ in order if each == trial_id]))
    ]
    assert [runtime.get_trial(each).state for each in ids] == ["failed", "finished", "finished", "finished"]


@pytest.mark.parametrize("how", ["call", "leaving"])
def test_queued_trial_that_is_cancelled_never_starts(
    runtime: RuntimeAPI, stub: runtime_pb2_grpc.RuntimeStub, accepted: Callable[[str], None], how: str
) -> None:
    running = RunningTrial(runtime, endless(runtime))
    running.wait_for(lambda event: isinstance(event, StepDone))
    request_id = uuid.uuid4().hex
    stream = stub.RunTrial(request_for(endless(runtime), request_id=request_id))
    accepted(request_id)
    queued = listed(runtime, request_id)
    with pytest.raises(Conflict, match=f"^trial {queued} is queued, not running$"):
        runtime.snapshot(queued)
    if how == "call":
        runtime.cancel_trial(queued)
    else:
        stream.cancel()
    after = RunningTrial(runtime, spec_for(runtime, {}, steps=1))
    runtime.cancel_trial(running.trial_id)
    running.wait()
    assert result_of(after.wait()).failure is None
    result = runtime.get_trial(queued).result
    assert result is not None
    assert (result.failure, result.steps, result.generations) == ("cancelled", 0, 0)
    if how == "call":
        assert [type(event_from_message(message)) for message in stream] == [TrialFailed]


# Refusals


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
        "set compress.codec=topk, or leave compress.ratio at its default 0.05",
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


def request_for(spec: TrialSpec, **fields: object) -> runtime_pb2.RunTrialRequest:
    values = {"request_id": uuid.uuid4().hex, **fields}
    return runtime_pb2.RunTrialRequest(spec=to_message(spec, types_pb2.TrialSpec), **values)


def events_of(stub: runtime_pb2_grpc.RuntimeStub, request: runtime_pb2.RunTrialRequest) -> list[Any]:
    """The whole stream, within the deadline."""
    return list(stub.RunTrial(request, timeout=DEADLINE_SECONDS))


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The status that a call is answered with."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error: Any = refused.value
    return error.code(), error.details()


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


# Health, reflection, streams, limits


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "paceline.v1.Runtime"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_SECONDS)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert "paceline.v1.Runtime" in reflected_services(channel)


def reflected_services(channel: grpc.Channel) -> set[str]:
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (reply,) = reflection.ServerReflectionInfo(requests, timeout=DEADLINE_SECONDS)
    return {service.name for service in reply.list_services_response.service}


@pytest.fixture
def full(embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub) -> Iterator[list[Any]]:
    """As many open streams as the server allows, all of one trial that nobody reads on."""
    request = request_for(endless(embedded))
    streams = [stub.RunTrial(request) for _ in range(MAX_STREAMS)]
    for stream in streams:
        next(stream)
    yield streams
    for stream in streams:
        stream.cancel()


def take_place(open_stream: Callable[[], Any]) -> Any:
    """The first stream that is accepted, with its first event; the server learns of a cancelled one a little later."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        stream = open_stream()
        with contextlib.suppress(grpc.RpcError):
            next(stream)
            return stream
    raise AssertionError("no place became free")


def test_server_answers_while_all_streams_are_open(
    embedded: EmbeddedRuntime, full: list[Any], channel: grpc.Channel, address: str
) -> None:
    with RuntimeClient(address, timeout=DEADLINE_SECONDS) as client:
        assert client.describe_knobs() == embedded.describe_knobs()
        assert client.describe_cluster() == embedded.describe_cluster()
        assert client.list_workloads() == embedded.list_workloads()
        trial_id = client.list_trials()[-1].trial_id
        assert client.get_trial(trial_id).state == "running"
        client.update_strategy(trial_id, client.describe_knobs().strategy({"compress.codec": "bf16"}))
        assert client.snapshot(trial_id).trial_id == trial_id
        client.cancel_trial(trial_id)
    test_health_and_reflection(channel)


def test_one_stream_more_than_allowed_is_refused_and_a_cancelled_one_makes_room(
    embedded: EmbeddedRuntime, full: list[Any], stub: runtime_pb2_grpc.RuntimeStub, address: str
) -> None:
    before = embedded.list_trials()
    message = "4 event streams are open, the most this server allows; close one"
    spec = spec_for(embedded, {}, steps=1)
    for _ in range(2):
        assert refusal(lambda: events_of(stub, request_for(spec))) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            message,
        )
    with RuntimeClient(address) as client, pytest.raises(Busy, match=f"^{message}$"):
        run(client, spec)
    assert [trial.trial_id for trial in embedded.list_trials()] == [trial.trial_id for trial in before]
    same = request_for(spec, request_id=before[-1].request_id)
    for index in range(MAX_STREAMS):
        full[index].cancel()
        full[index] = take_place(lambda: stub.RunTrial(same))
        assert refusal(lambda: events_of(stub, same)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def test_refused_requests_keep_no_place(embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub) -> None:
    bad = request_for(dataclasses.replace(spec_for(embedded, {}, steps=1), workload="nothing"))
    for _ in range(3 * MAX_STREAMS):
        assert refusal(lambda: events_of(stub, bad))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_client_that_does_not_read_keeps_no_place_once_it_has_gone(
    embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub, address: str
) -> None:
    # More events than flow control lets the server send ahead.
    request = request_for(spec_for(embedded, {}, steps=60, snapshot_every=1))
    events = events_of(stub, request)
    assert sum(event.ByteSize() for event in events) > 2 * 2**16
    with grpc.insecure_channel(address) as idle:
        streams = [runtime_pb2_grpc.RuntimeStub(idle).RunTrial(request) for _ in range(MAX_STREAMS)]
        for stream in streams:
            next(stream)
        assert refusal(lambda: events_of(stub, request))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    for stream in [take_place(lambda: stub.RunTrial(request)) for _ in range(MAX_STREAMS)]:
        stream.cancel()


def test_client_whose_connection_breaks_as_the_last_listener_cancels(embedded: EmbeddedRuntime, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        started = next(runtime_pb2_grpc.RuntimeStub(channel).RunTrial(request_for(endless(embedded))))
    run(embedded, spec_for(embedded, {}, steps=1))
    result = embedded.get_trial(event_from_message(started).trial_id).result
    assert result is not None
    assert result.failure == "cancelled"


def test_message_over_the_limit_is_refused_by_both_sides(
    embedded: EmbeddedRuntime, stub: runtime_pb2_grpc.RuntimeStub, address: str
) -> None:
    spec = dataclasses.replace(spec_for(embedded, {}, steps=1), workload="x" * (MESSAGE_LIMIT + 1))
    code, details = refusal(lambda: events_of(stub, request_for(spec)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MESSAGE_LIMIT) in details
    with RuntimeClient(address) as client:
        with pytest.raises(Busy, match=str(MESSAGE_LIMIT)):
            run(client, spec)
        assert client.describe_cluster() == embedded.describe_cluster()


# Clients of what is no runtime


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with RuntimeClient(address) as client:
        for call in (client.describe_knobs, client.list_trials, lambda: next(iter(client.run_trial(ANY_SPEC)))):
            with pytest.raises(Unreachable, match=f"^no Paceline server answers at {address}: "):
                call()


def test_server_that_never_answers_meets_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            RuntimeClient(address, timeout=0.5) as client,
            pytest.raises(Unreachable, match=f"^no Paceline server answers at {address}: "),
        ):
            client.describe_cluster()


def test_server_without_this_service() -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with RuntimeClient(address) as client:
        for call in (client.describe_knobs, lambda: next(iter(client.run_trial(ANY_SPEC)))):
            with pytest.raises(Unreachable, match=f"^the server at {address} does not offer this service: "):
                call()
    server.stop(None)


def test_server_of_another_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            RuntimeClient(address, timeout=5.0) as client,
            pytest.raises(Unreachable, match=f"^no Paceline server answers at {address}: "),
        ):
            client.describe_cluster()


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":7077", "localhost:99999", "localhost:http"])
def test_address_that_is_none(address: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^address '{address}' must be HOST:PORT; for example 127.0.0.1:7077$"):
        RuntimeClient(address)
