"""The gRPC service in front of a stored policy."""

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.proto.paceline.v1 import policy_pb2, policy_pb2_grpc, types_pb2
from paceline.runtime.convert import from_message, strategy_to_message
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import Busy, InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.runtime.rpc import SERVER_OPTIONS, check_listen_address, unary, write_port_file
from paceline.tuner.policy.decide import recommend
from paceline.tuner.policy.store import StoredPolicy

MAX_CALLS = 256
"""Recommendations waited for at once; more are refused. Other calls need none of these places."""

Context = grpc.aio.ServicerContext[Any, Any]


class PolicyService(policy_pb2_grpc.PolicyServicer):
    """Converts, checks, and answers one question at a time. A question changes nothing, answered or refused."""

    def __init__(self, policy: StoredPolicy, space: KnobSpace, *, max_calls: int = MAX_CALLS) -> None:
        """Raises InvalidRequest when the policy was trained for another knob space."""
        self._policy = policy.require(space)
        self._space = space
        self._max_calls = max_calls
        self._calls = 0
        # An answer holds the interpreter lock nearly all the time. One thread answers as many per second as several
        # would, and leaves the event loop its turn, so that health and other calls stay responsive.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="policy")

    @unary
    async def Recommend(self, request: policy_pb2.RecommendRequest, context: Context) -> Any:
        """The next strategy, or the one to settle on."""
        if self._calls >= self._max_calls:
            raise Busy(f"{self._max_calls} calls wait for an answer, the most this server allows; try again")
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._answer, request)
        finally:
            self._calls -= 1

    @unary
    async def DescribePolicy(self, request: policy_pb2.DescribePolicyRequest, context: Context) -> Any:
        """Which policy this is."""
        manifest = self._policy.manifest
        return policy_pb2.DescribePolicyReply(
            name=self._policy.name,
            digest=self._policy.digest,
            knob_version=manifest.knob_version,
            candidates=manifest.candidates,
        )

    def close(self) -> None:
        """Drop the questions that no answer was begun for."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _answer(self, request: policy_pb2.RecommendRequest) -> policy_pb2.RecommendReply:
        if request.knob_version != self._space.version:
            raise InvalidRequest(
                f"the request is for knob space {request.knob_version!r}; this policy knows {self._space.version}"
            )
        cluster = from_message(request.cluster, Cluster)
        found = recommend(
            self._policy,
            space=self._space,
            workload=from_message(request.workload, WorkloadProfile),
            cluster=cluster,
            trials=[self._trial(message, cluster) for message in request.trials],
            remaining=request.remaining_trials,
            seed=request.seed,
            candidates=self._policy.manifest.candidates,
        )
        return policy_pb2.RecommendReply(
            strategy=strategy_to_message(found.strategy),
            expected_gain=found.expected_gain,
            uncertainty=found.uncertainty,
            policy_digest=found.policy_digest,
        )

    def _trial(self, message: types_pb2.TrialResult, cluster: Cluster) -> TrialResult:
        """A trial with its strategy completed and checked."""
        trial = from_message(message, TrialResult)
        return dataclasses.replace(trial, strategy=self._space.strategy(trial.strategy, world_size=cluster.size))


async def start_service(service: PolicyService, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve with health and reflection; the server and its port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    policy_pb2_grpc.add_PolicyServicer_to_server(service, server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    name = policy_pb2.DESCRIPTOR.services_by_name["Policy"].full_name
    for checked in ("", name):
        await checks.set(checked, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, bound


async def serve(
    policy: StoredPolicy,
    *,
    listen: str,
    port_file: Path | None = None,
    allow_insecure: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the policy for this process's knob space until SIGINT or SIGTERM.

    `on_ready` is called with the address once calls are answered. Raises InvalidRequest or Conflict before anything
    starts.
    """
    host, port = check_listen_address(listen, allow_insecure=allow_insecure)
    service = PolicyService(policy, knob_space())
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server, bound = await start_service(service, host, port)
    try:
        if port_file is not None:
            write_port_file(port_file, bound)
        if on_ready is not None:
            on_ready(f"{host}:{bound}")
        await stop.wait()
    finally:
        await server.stop(1.0)
        service.close()
        if port_file is not None:
            port_file.unlink(missing_ok=True)


@contextmanager
def serving(policy: StoredPolicy, *, listen: str = "127.0.0.1:0", max_calls: int = MAX_CALLS) -> Iterator[str]:
    """Serve the policy in a thread of this process; gives the address. Raises as `serve` does."""
    host, port = check_listen_address(listen, allow_insecure=False)
    service = PolicyService(policy, knob_space(), max_calls=max_calls)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="policy-server")
    thread.start()
    try:
        server, bound = asyncio.run_coroutine_threadsafe(start_service(service, host, port), loop).result()
        try:
            yield f"{host}:{bound}"
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(1.0), loop).result()
    finally:
        service.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
