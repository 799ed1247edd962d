"""The gRPC client of a runtime: `api.RuntimeAPI` over a channel."""

import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from paceline.proto.paceline.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2
from paceline.runtime.convert import (
    event_from_message,
    from_message,
    knob_space_from_message,
    strategy_to_message,
    to_message,
)
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import TrialEvent
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Trial, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import Conflict
from paceline.runtime.rpc import CHANNEL_OPTIONS, DEADLINE_SECONDS, error_from_rpc, parse_address


class RuntimeClient:
    """A connection to a runtime. Each method has a deadline; `RuntimeAPI` documents them."""

    def __init__(self, address: str, *, timeout: float = DEADLINE_SECONDS) -> None:
        """Connect lazily: the first call finds out whether a runtime answers, within `timeout` seconds."""
        parse_address(address)
        self.address = address
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = runtime_pb2_grpc.RuntimeStub(self._channel)
        self._version = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None

    def describe_knobs(self) -> KnobSpace:
        """The knob space. Raises Conflict when client and runtime derive different versions from it."""
        reply = self._call(self._stub.DescribeKnobs, runtime_pb2.DescribeKnobsRequest())
        space = knob_space_from_message(reply.space)
        if space.version != reply.version:
            raise Conflict(
                f"{self.address} has knob space {reply.version}, which this client reads as {space.version}; "
                "use the same Paceline release on both sides"
            )
        self._version = reply.version
        return space

    def describe_cluster(self) -> Cluster:
        """The measured cluster."""
        reply = self._call(self._stub.DescribeCluster, runtime_pb2.DescribeClusterRequest())
        return from_message(reply, Cluster)

    def list_workloads(self) -> tuple[WorkloadProfile, ...]:
        """All workload profiles."""
        reply = self._call(self._stub.ListWorkloads, runtime_pb2.ListWorkloadsRequest())
        return tuple(from_message(message, WorkloadProfile) for message in reply.workloads)

    def run_trial(self, spec: TrialSpec, *, request_id: str = "") -> Iterator[TrialEvent]:
        """Run a trial; closing the iterator cancels the stream. The stream has no deadline: the budget is one."""
        request = runtime_pb2.RunTrialRequest(
            request_id=request_id or uuid.uuid4().hex,
            spec=to_message(spec, types_pb2.TrialSpec),
            knob_version=self._version,
        )
        stream = self._stub.RunTrial(request)
        try:
            for message in stream:
                yield event_from_message(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]

    def update_strategy(self, trial_id: str, strategy: Strategy, *, request_id: str = "") -> int:
        """Switch live; the generation from which the strategy is in force."""
        request = runtime_pb2.UpdateStrategyRequest(
            request_id=request_id or uuid.uuid4().hex, trial_id=trial_id, strategy=strategy_to_message(strategy)
        )
        return int(self._call(self._stub.UpdateStrategy, request).generation)

    def cancel_trial(self, trial_id: str) -> None:
        """End a trial."""
        request = runtime_pb2.CancelTrialRequest(request_id=uuid.uuid4().hex, trial_id=trial_id)
        self._call(self._stub.CancelTrial, request)

    def get_trial(self, trial_id: str) -> Trial:
        """One trial."""
        reply = self._call(self._stub.GetTrial, runtime_pb2.GetTrialRequest(trial_id=trial_id))
        return from_message(reply, Trial)

    def list_trials(self) -> tuple[Trial, ...]:
        """All trials, oldest first."""
        reply = self._call(self._stub.ListTrials, runtime_pb2.ListTrialsRequest())
        return tuple(from_message(message, Trial) for message in reply.trials)

    def snapshot(self, trial_id: str, *, request_id: str = "") -> Snapshot:
        """Take a snapshot now."""
        request = runtime_pb2.SnapshotRequest(request_id=request_id or uuid.uuid4().hex, trial_id=trial_id)
        return from_message(self._call(self._stub.Snapshot, request), Snapshot)

    def change_cluster(self, changes: Sequence[str], *, request_id: str = "") -> None:
        """Change the cluster now."""
        request = runtime_pb2.ChangeClusterRequest(request_id=request_id or uuid.uuid4().hex, changes=changes)
        self._call(self._stub.ChangeCluster, request)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
