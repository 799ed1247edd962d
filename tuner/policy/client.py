"""The gRPC client of a served policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from paceline.proto.paceline.v1 import policy_pb2, policy_pb2_grpc, types_pb2
from paceline.runtime.convert import settings_from_message, to_message
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.rpc import CHANNEL_OPTIONS, DEADLINE_SECONDS, error_from_rpc, parse_address
from paceline.tuner.policy.decide import Recommendation


@dataclass(frozen=True, kw_only=True)
class PolicyDescription:
    """What a server says about its policy."""

    name: str
    """`policy`."""
    digest: str
    """SHA-256 of the stored policy, hex."""
    knob_version: str
    """Knob space it was trained for."""
    candidates: int
    """Candidates it ranks at once; sessions propose as many."""


class PolicyClient:
    """A connection to a policy server. Each method has a deadline and raises what the server refused with."""

    def __init__(self, address: str, *, timeout: float = DEADLINE_SECONDS) -> None:
        """Connect lazily: the first call finds out whether a policy answers, within `timeout` seconds."""
        parse_address(address)
        self.address = address
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = policy_pb2_grpc.PolicyStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def recommend(
        self,
        *,
        space: KnobSpace,
        workload: WorkloadProfile,
        cluster: Cluster,
        trials: Sequence[TrialResult],
        remaining: int,
        seed: int,
    ) -> Recommendation:
        """`paceline.tuner.policy.decide.recommend`, answered by the server."""
        request = policy_pb2.RecommendRequest(
            knob_version=space.version,
            workload=to_message(workload, types_pb2.WorkloadProfile),
            cluster=to_message(cluster, types_pb2.Cluster),
            trials=[to_message(trial, types_pb2.TrialResult) for trial in trials],
            remaining_trials=remaining,
            seed=seed,
        )
        reply = self._call(self._stub.Recommend, request)
        return Recommendation(
            strategy=space.strategy(settings_from_message(reply.strategy), world_size=cluster.size),
            expected_gain=reply.expected_gain,
            uncertainty=reply.uncertainty,
            policy_digest=reply.policy_digest,
        )

    def describe(self) -> PolicyDescription:
        """Which policy is served."""
        reply = self._call(self._stub.DescribePolicy, policy_pb2.DescribePolicyRequest())
        return PolicyDescription(
            name=reply.name,
            digest=reply.digest,
            knob_version=reply.knob_version,
            candidates=reply.candidates,
        )

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None
