"""What a runtime offers, as one interface: `RuntimeClient` (gRPC) and `EmbeddedRuntime` (in process) both have it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import TrialEvent, TrialFailed, TrialFinished
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Trial, TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import WorkerFailure


class RuntimeAPI(Protocol):
    """Every method raises a `PacelineError` subclass on refusal; a refused request changes nothing."""

    def describe_knobs(self) -> KnobSpace:
        """The knob space of this runtime, whose `version` policies are stored for."""

    def describe_cluster(self) -> Cluster:
        """Devices and links, measured when the runtime started."""

    def list_workloads(self) -> tuple[WorkloadProfile, ...]:
        """Workloads that the operator has registered, each variant on its own."""

    def run_trial(self, spec: TrialSpec, *, request_id: str = "") -> Iterator[TrialEvent]:
        """Run a trial and stream its events; the last is `TrialFinished` or `TrialFailed`.

        The same `request_id` never starts a second trial: it attaches to the first one's events. Closing the
        iterator cancels the trial if no other client is attached.
        """

    def update_strategy(self, trial_id: str, strategy: Strategy, *, request_id: str = "") -> int:
        """Switch a running trial live; returns the generation from which the new strategy is in force."""

    def cancel_trial(self, trial_id: str) -> None:
        """End a trial with the label `cancelled`. Idempotent."""

    def get_trial(self, trial_id: str) -> Trial:
        """One trial. Raises NotFound."""

    def list_trials(self) -> tuple[Trial, ...]:
        """All trials of this runtime, oldest first."""

    def snapshot(self, trial_id: str, *, request_id: str = "") -> Snapshot:
        """Take a snapshot of a running trial at its next step boundary."""

    def change_cluster(self, changes: Sequence[str], *, request_id: str = "") -> None:
        """Change what the cluster can do, at once: `TARGET.SETTING=VALUE` each, all of them or none.

        Raises InvalidRequest where the cluster was not built by its launcher, as a lab is.
        """

    def close(self) -> None:
        """Release the connection; an embedded runtime stops its workers."""


def run_to_result(runtime: RuntimeAPI, spec: TrialSpec, *, request_id: str = "") -> TrialResult:
    """Run a trial to its end and return its result; a failed trial is a labelled result, not an exception."""
    for event in runtime.run_trial(spec, request_id=request_id):
        if isinstance(event, TrialFinished | TrialFailed):
            return event.result
    raise WorkerFailure("the runtime ended the event stream of a trial without a result")
