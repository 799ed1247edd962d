"""The gRPC server beside its methods: health, reflection, streams, limits, and servers that are none."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.proto.paceline.v1 import runtime_pb2_grpc
from paceline.runtime.client import RuntimeClient
from paceline.runtime.convert import event_from_message
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Busy, InvalidRequest, Unreachable
from paceline.runtime.rpc import MESSAGE_LIMIT, SERVER_OPTIONS
from tests.runtime.conftest import MAX_STREAMS
from tests.runtime.support import (
    DEADLINE_SECONDS,
    endless,
    events_of,
    refusal,
    request_for,
    run,
    spec_for,
)

ANY_SPEC = TrialSpec(workload="regression", strategy=Strategy.of({}), budget=Budget(steps=1))


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
