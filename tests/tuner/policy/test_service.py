"""The served policy, over real gRPC: always the same answer, no answer for a wrong question, never deaf."""

import asyncio
import dataclasses
import hashlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as tensors_to_bytes

from paceline.proto.paceline.v1 import policy_pb2, policy_pb2_grpc, types_pb2
from paceline.runtime.convert import knob_value_to_message, to_message
from paceline.runtime.errors import Conflict, InvalidRequest, Unreachable
from paceline.runtime.knobs import knob_space
from paceline.runtime.rpc import MESSAGE_LIMIT
from paceline.tuner.policy.client import PolicyClient
from paceline.tuner.policy.decide import recommend
from paceline.tuner.policy.service import PolicyService, serve, serving
from paceline.tuner.policy.store import StoredPolicy, load
from tests.tuner.policy.simulated import CANDIDATES, Session

DEADLINE = 20.0
"""Of every call here, s: long enough for a busy machine, short enough to end a test that hangs."""

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def address(policy: StoredPolicy) -> Iterator[str]:
    with serving(policy) as address:
        yield address


@pytest.fixture(scope="module")
def stub(address: str) -> Iterator[policy_pb2_grpc.PolicyStub]:
    with grpc.insecure_channel(address) as channel:
        yield policy_pb2_grpc.PolicyStub(channel)


def request_of(session: Session, *, remaining: int = 3) -> policy_pb2.RecommendRequest:
    return policy_pb2.RecommendRequest(
        knob_version=session.case.space.version,
        workload=to_message(session.case.workload, types_pb2.WorkloadProfile),
        cluster=to_message(session.case.cluster, types_pb2.Cluster),
        trials=[to_message(trial, types_pb2.TrialResult) for trial in session.trials],
        remaining_trials=remaining,
        seed=session.seed,
    )


def ask(stub: policy_pb2_grpc.PolicyStub, request: policy_pb2.RecommendRequest) -> bytes:
    return stub.Recommend(request, timeout=DEADLINE).SerializeToString(deterministic=True)


def ended(stub: policy_pb2_grpc.PolicyStub, request: policy_pb2.RecommendRequest, *, timeout: float) -> Any:
    """The call once it has ended, in whatever way."""
    call = stub.Recommend.future(request, timeout=timeout)
    call.exception()
    return call


def state_digest(policy: StoredPolicy) -> str:
    """Of everything the server could have changed."""
    return hashlib.sha256(tensors_to_bytes(policy.scorer.state_dict())).hexdigest() + repr(policy.manifest)


def test_client_and_function_answer_alike(address: str, policy: StoredPolicy, sessions: list[Session]) -> None:
    with PolicyClient(address, timeout=DEADLINE) as client:
        for session in sessions:
            for remaining in (0, 3):
                question = session.question(remaining=remaining)
                assert client.recommend(**question) == recommend(policy, candidates=CANDIDATES, **question)


def test_describes_the_policy(address: str, policy: StoredPolicy) -> None:
    with PolicyClient(address, timeout=DEADLINE) as client:
        found = client.describe()
    assert (found.name, found.digest) == ("policy", policy.digest)
    assert (found.knob_version, found.candidates) == (knob_space().version, CANDIDATES)


def test_settings_left_out_of_a_trial_take_their_defaults(
    stub: policy_pb2_grpc.PolicyStub, sessions: list[Session]
) -> None:
    request = request_of(sessions[1])
    complete = ask(stub, request)
    request.trials[0].strategy.Clear()
    assert ask(stub, request) == complete


def test_answers_are_the_same_after_reload_and_under_concurrent_calls(
    stub: policy_pb2_grpc.PolicyStub, folder: Path, sessions: list[Session]
) -> None:
    requests = [request_of(session) for session in sessions]
    alone = [ask(stub, request) for request in requests]
    with (
        serving(load(folder)) as address,
        grpc.insecure_channel(address) as channel,
        ThreadPoolExecutor(64) as threads,
    ):
        reloaded = policy_pb2_grpc.PolicyStub(channel)
        together = list(threads.map(lambda request: ask(reloaded, request), requests * 16))
    assert together == alone * 16


def with_knob(name: str, value: bool | int | float | str) -> types_pb2.Strategy:
    return types_pb2.Strategy(values={name: knob_value_to_message(value)})


def illegal_requests(session: Session) -> dict[str, policy_pb2.RecommendRequest]:
    requests = {}

    def case(name: str) -> policy_pb2.RecommendRequest:
        requests[name] = request_of(session)
        return requests[name]

    requests["nothing set"] = policy_pb2.RecommendRequest()
    case("other knob version").knob_version = "0123456789ab"
    case("no knob version").knob_version = ""
    case("no workload").ClearField("workload")
    case("empty batch").workload.global_batch = 0
    case("batch smaller than the cluster").workload.global_batch = 1
    case("infinite work").workload.flops_per_sample = float("inf")
    case("no cluster").ClearField("cluster")
    case("device without speed").cluster.devices[0].profile.flops = 0.0
    case("device speed unknown").cluster.devices[0].profile.flops = float("nan")
    case("device twice").cluster.devices[1].name = session.case.cluster.devices[0].name
    case("link without bandwidth").cluster.links[0].bandwidth = 0.0
    case("unknown knob").trials[1].strategy.CopyFrom(with_knob("sync.mod", "allreduce"))
    case("value out of range").trials[1].strategy.CopyFrom(with_knob("sync.bucket_mb", -1.0))
    case("value of another type").trials[1].strategy.CopyFrom(with_knob("sync.mode", 3))
    case("knob without a value").trials[1].strategy.values["sync.mode"].Clear()
    case("combination without effect").trials[1].strategy.CopyFrom(with_knob("sync.period", 3))
    case("permutation too short").trials[1].strategy.CopyFrom(with_knob("mapping.order", "0"))
    case("no candidate").trials[1].strategy.CopyFrom(with_knob("sync.bucket_mb", 1.2345))
    case("no reference trial").trials.pop(0)
    case("other workload").trials[1].workload = "other"
    case("other cluster").trials[1].cluster = "other"
    case("other world size").trials[1].world_size += 1
    return requests


@pytest.fixture(scope="module")
def session(sessions: list[Session]) -> Session:
    """One with several devices and trials."""
    return max(sessions, key=lambda session: len(session.trials))


def test_illegal_requests_are_refused_and_change_nothing(
    stub: policy_pb2_grpc.PolicyStub, policy: StoredPolicy, session: Session
) -> None:
    question = request_of(session)
    answer, state = ask(stub, question), state_digest(policy)
    for name, request in illegal_requests(session).items():
        with pytest.raises(grpc.RpcError) as refused:
            ask(stub, request)
        assert (name, refused.value.code()) == (name, INVALID)
        assert "\n" not in refused.value.details(), name
        assert ask(stub, question) == answer, name
    assert state_digest(policy) == state


NUMBERS = st.sampled_from([0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf")]) | st.floats()


@st.composite
def disturbed(draw: st.DrawFn, request: policy_pb2.RecommendRequest) -> policy_pb2.RecommendRequest:
    """A request with one field, anywhere in it, set to something else of its type."""
    changed = policy_pb2.RecommendRequest()
    changed.CopyFrom(request)
    message: Any = changed
    while True:
        if not message.ListFields():
            # All its fields are at their defaults, such as the interval (0, 0) of a failed trial.
            return changed
        field, value = draw(st.sampled_from(message.ListFields()))
        if field.is_repeated:
            if field.message_type is None or field.message_type.GetOptions().map_entry or draw(st.booleans()):
                message.ClearField(field.name)
                return changed
            value = draw(st.sampled_from(list(value)))
        if field.message_type is None:
            break
        message = value
    kinds = {
        field.CPPTYPE_DOUBLE: NUMBERS,
        field.CPPTYPE_STRING: st.text(max_size=8),
        field.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
        field.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    }
    setattr(message, field.name, draw(kinds[field.cpp_type]))
    return changed


@settings(max_examples=60)
@given(data=st.data())
def test_disturbed_requests_are_answered_or_refused(
    stub: policy_pb2_grpc.PolicyStub, session: Session, data: st.DataObject
) -> None:
    request = data.draw(disturbed(request_of(session)))
    call = ended(stub, request, timeout=DEADLINE)
    assert call.code() in (grpc.StatusCode.OK, INVALID), call.details()
    if call.code() is grpc.StatusCode.OK:
        assert 0 < call.result().expected_gain < float("inf")
        assert 0 <= call.result().uncertainty < float("inf")


def test_messages_over_the_limit_are_refused(stub: policy_pb2_grpc.PolicyStub, session: Session) -> None:
    request = request_of(session)
    answer = ask(stub, request)
    large = request_of(session)
    large.workload.doc = "x" * (MESSAGE_LIMIT + 1)
    with pytest.raises(grpc.RpcError) as refused:
        ask(stub, large)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask(stub, request) == answer


class Gate:
    """Holds every answer back until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()


@dataclasses.dataclass(frozen=True, eq=False)
class GatedPolicy(StoredPolicy):
    """A stored policy that answers when its gate is opened."""

    gate: Gate = dataclasses.field(default_factory=Gate)

    def choose(self, case: Any, trials: Any) -> int:
        self.gate.reached.set()
        assert self.gate.open.wait(DEADLINE)
        return super().choose(case, trials)


@pytest.fixture
def gated(policy: StoredPolicy) -> Iterator[GatedPolicy]:
    gated = GatedPolicy(policy.manifest, policy.scorer, policy.digest)
    yield gated
    gated.gate.open.set()


def test_other_calls_are_answered_while_many_wait(gated: GatedPolicy, sessions: list[Session]) -> None:
    with serving(gated) as address, grpc.insecure_channel(address) as channel:
        stub = policy_pb2_grpc.PolicyStub(channel)
        requests = [request_of(session) for session in sessions] * 16
        waiting = [stub.Recommend.future(request, timeout=4 * DEADLINE) for request in requests]
        assert gated.gate.reached.wait(DEADLINE)
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "paceline.v1.Policy"):
            check = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
            assert check.status == health_pb2.HealthCheckResponse.SERVING
        assert stub.DescribePolicy(policy_pb2.DescribePolicyRequest(), timeout=DEADLINE).digest == gated.digest
        assert not any(call.done() for call in waiting)
        gated.gate.open.set()
        replies = [call.result().SerializeToString(deterministic=True) for call in waiting]
    assert replies == replies[: len(sessions)] * 16


def test_a_full_server_refuses_and_a_cancelled_call_frees_its_place(gated: GatedPolicy, session: Session) -> None:
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    with serving(gated, max_calls=2) as address, grpc.insecure_channel(address) as channel:
        stub = policy_pb2_grpc.PolicyStub(channel)
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls = [stub.Recommend.future(request_of(session), timeout=DEADLINE) for _ in range(3)]
        for call in calls:
            call.add_done_callback(done.put)
        refused = done.get(timeout=DEADLINE)
        assert refused.code() is full
        assert "2 calls wait" in refused.details()
        waiting = [call for call in calls if call is not refused]
        waiting[0].cancel()
        # The place is free once the server has heard of it. A call that gets it runs into its own deadline.
        while ended(stub, request_of(session), timeout=1.0).code() is full:
            assert not waiting[1].done()
        gated.gate.open.set()
        assert waiting[1].result().policy_digest == gated.digest


def test_deadlines_are_kept(gated: GatedPolicy, session: Session) -> None:
    with serving(gated) as address, PolicyClient(address, timeout=0.2) as client:
        with pytest.raises(Unreachable, match="no Paceline server answers"):
            client.recommend(**session.question())
        gated.gate.open.set()


def test_nobody_there_is_said_in_one_line() -> None:
    with PolicyClient("127.0.0.1:1", timeout=DEADLINE) as client, pytest.raises(Unreachable) as refused:
        client.describe()
    assert "\n" not in str(refused.value)


def test_reflection_lists_the_service(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        assert "paceline.v1.Policy" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_serves_until_sigterm(policy: StoredPolicy, session: Session, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    answers: list[Any] = []

    def ask_and_stop(address: str) -> None:
        try:
            assert port_file.read_text() == address.rpartition(":")[2] + "\n"
            with PolicyClient(address, timeout=DEADLINE) as client:
                answers.append(client.recommend(**session.question()))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(address: str) -> None:
        threading.Thread(target=ask_and_stop, args=(address,)).start()

    asyncio.run(serve(policy, listen="127.0.0.1:0", port_file=port_file, on_ready=on_ready))
    assert answers == [recommend(policy, candidates=CANDIDATES, **session.question())]
    assert not port_file.exists()


def test_wrong_addresses_are_refused_before_anything_starts(policy: StoredPolicy, address: str) -> None:
    for listen, error in (("0.0.0.0:0", InvalidRequest), ("nowhere", InvalidRequest), (address, Conflict)):
        with pytest.raises(error):
            asyncio.run(serve(policy, listen=listen))


def test_a_policy_of_another_knob_space_is_not_served(policy: StoredPolicy) -> None:
    space = knob_space()
    with pytest.raises(InvalidRequest, match="trained for knob space"):
        PolicyService(policy, dataclasses.replace(space, knobs=space.knobs[1:]))
