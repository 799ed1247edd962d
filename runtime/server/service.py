"""The gRPC service in front of a `Runtime`."""

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.proto.paceline.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2
from paceline.runtime.convert import (
    event_to_message,
    from_message,
    settings_from_message,
    to_message,
)
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.errors import Busy, Conflict, InvalidRequest
from paceline.runtime.rpc import SERVER_OPTIONS, check_listen_address, streaming, unary, write_port_file
from paceline.runtime.server.core import Runtime

MAX_STREAMS = 64
"""Event streams open at once. Unary calls and health checks need none of these places."""

Context = grpc.aio.ServicerContext[Any, Any]


class RuntimeService(runtime_pb2_grpc.RuntimeServicer):
    """Converts, delegates, and counts open streams."""

    def __init__(self, runtime: Runtime, *, max_streams: int = MAX_STREAMS) -> None:
        self._runtime = runtime
        self._max_streams = max_streams
        self._streams = 0

    @unary
    async def DescribeKnobs(self, request: runtime_pb2.DescribeKnobsRequest, context: Context) -> Any:
        """The knob space and its version."""
        space = self._runtime.space
        return runtime_pb2.DescribeKnobsReply(version=space.version, space=to_message(space, types_pb2.KnobSpace))

    @unary
    async def DescribeCluster(self, request: runtime_pb2.DescribeClusterRequest, context: Context) -> Any:
        """The measured cluster."""
        return to_message(self._runtime.cluster, types_pb2.Cluster)

    @unary
    async def ListWorkloads(self, request: runtime_pb2.ListWorkloadsRequest, context: Context) -> Any:
        """All workload profiles."""
        profiles = await asyncio.to_thread(self._runtime.list_workloads)
        return runtime_pb2.ListWorkloadsReply(
            workloads=[to_message(profile, types_pb2.WorkloadProfile) for profile in profiles]
        )

    @streaming
    async def RunTrial(self, request: runtime_pb2.RunTrialRequest, context: Context) -> AsyncIterator[Any]:
        """Submit, then stream events until the trial has ended or the client leaves."""
        _require_id(request.request_id)
        version = self._runtime.space.version
        if request.knob_version not in ("", version):
            raise Conflict(
                f"the strategy is of knob space {request.knob_version}, this runtime has {version}; "
                "describe the knobs again"
            )
        if self._streams >= self._max_streams:
            raise Busy(f"{self._max_streams} event streams are open, the most this server allows; close one")
        self._streams += 1
        try:
            spec = from_message(request.spec, TrialSpec)
            # The settings may be incomplete: clients in other languages need not know every knob.
            spec = dataclasses.replace(spec, strategy=self._runtime.complete_strategy(spec, spec.strategy))
            entry = await self._runtime.submit(spec, request.request_id)
            async with aclosing(self._runtime.events(entry)) as events:
                async for batch in events:
                    for event in batch:
                        yield event_to_message(event)
        finally:
            self._streams -= 1

    @unary
    async def UpdateStrategy(self, request: runtime_pb2.UpdateStrategyRequest, context: Context) -> Any:
        """Switch a running trial live."""
        _require_id(request.request_id)
        entry = self._runtime.entry(request.trial_id)
        strategy = self._runtime.complete_strategy(entry.spec, settings_from_message(request.strategy))
        generation = await self._runtime.update_strategy(entry, strategy, request.request_id)
        return runtime_pb2.UpdateStrategyReply(generation=generation)

    @unary
    async def CancelTrial(self, request: runtime_pb2.CancelTrialRequest, context: Context) -> Any:
        """End a trial."""
        self._runtime.cancel(self._runtime.entry(request.trial_id))
        return runtime_pb2.CancelTrialReply()

    @unary
    async def GetTrial(self, request: runtime_pb2.GetTrialRequest, context: Context) -> Any:
        """Describe one trial."""
        return to_message(self._runtime.trial(self._runtime.entry(request.trial_id)), types_pb2.Trial)

    @unary
    async def ListTrials(self, request: runtime_pb2.ListTrialsRequest, context: Context) -> Any:
        """Describe all trials."""
        trials = [to_message(trial, types_pb2.Trial) for trial in self._runtime.trials()]
        return runtime_pb2.ListTrialsReply(trials=trials)

    @unary
    async def Snapshot(self, request: runtime_pb2.SnapshotRequest, context: Context) -> Any:
        """Take a snapshot of a running trial."""
        _require_id(request.request_id)
        entry = self._runtime.entry(request.trial_id)
        snapshot = await self._runtime.snapshot(entry, request.request_id)
        return to_message(snapshot, types_pb2.Snapshot)

    @unary
    async def ChangeCluster(self, request: runtime_pb2.ChangeClusterRequest, context: Context) -> Any:
        """Change the cluster."""
        _require_id(request.request_id)
        await self._runtime.change_cluster(request.changes, request.request_id)
        return runtime_pb2.ChangeClusterReply()


def _require_id(request_id: str) -> None:
    if not request_id:
        raise InvalidRequest("request_id must be set; any unique text, for example a UUID")


async def start_service(
    runtime: Runtime, host: str, port: int, *, max_streams: int = MAX_STREAMS
) -> tuple[grpc.aio.Server, int]:
    """Serve a started runtime with health and reflection; the server and its port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    runtime_pb2_grpc.add_RuntimeServicer_to_server(RuntimeService(runtime, max_streams=max_streams), server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    name = runtime_pb2.DESCRIPTOR.services_by_name["Runtime"].full_name
    for service in ("", name):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, bound


async def serve(
    cluster: str,
    *,
    listen: str,
    port_file: Path | None = None,
    store_url: str | None = None,
    workload_classes: tuple[str, ...] = (),
    profiles: Path | None = None,
    allow_insecure: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Run a runtime until SIGINT or SIGTERM. Everything is checked before a worker starts.

    `on_ready` is called with the address once calls are answered. Raises InvalidRequest, Conflict or WorkerFailure.
    """
    host, port = check_listen_address(listen, allow_insecure=allow_insecure)
    runtime = Runtime(cluster, store_url=store_url, workload_classes=workload_classes, profiles=profiles)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server: grpc.aio.Server | None = None
    starting = asyncio.create_task(runtime.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            server, bound = await start_service(runtime, host, port)
            if port_file is not None:
                write_port_file(port_file, bound)
            if on_ready is not None:
                on_ready(f"{host}:{bound}")
            await stopping
    finally:
        for task in (starting, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        if server is not None:
            await server.stop(1.0)
        await runtime.close()
        if port_file is not None:
            port_file.unlink(missing_ok=True)
