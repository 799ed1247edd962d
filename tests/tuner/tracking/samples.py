"""A workload, a cluster, a trial and its events, for the tracking tests and the processes they start."""

from typing import Any

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link
from paceline.runtime.domain.events import Evaluated, SnapshotTaken, StepDone
from paceline.runtime.domain.snapshot import Snapshot, SnapshotPart
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, HeldOutPoint, StepSplit, TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.tuner.tracking.session import TuningSession
from paceline.tuner.tracking.store import TrackingStore

WORKLOAD = WorkloadProfile(
    name="bytes-lm/tiny",
    doc="A byte-level language model.",
    global_batch=32,
    train_samples=1000,
    heldout_samples=100,
    parameters=5000,
    parameter_tensors=20,
    flops_per_sample=1e6,
)
PROFILE = DeviceProfile(flops=1e10, mem_bw=1e10, net_latency=1e-4, pcie_bw=0.0, memory=1e9)
CLUSTER = Cluster(
    name="local:1",
    devices=(Device(name="localhost/cpu0", node="localhost", kind="cpu", profile=PROFILE),),
    links=(Link(source="localhost", target="localhost", bandwidth=1e9, alone=1e9, latency=1e-5),),
)
STRATEGY = Strategy.of({"sync.mode": "local_sgd", "sync.period": 8, "compress.error_feedback": True})
SPEC = TrialSpec(workload=WORKLOAD.name, strategy=STRATEGY, budget=Budget(steps=200), seed=7)
SNAPSHOT = Snapshot(
    snapshot_id="snap-1",
    trial_id="trial-1",
    workload=WORKLOAD.name,
    step=100,
    cursor=3200,
    world_size=1,
    seed=7,
    strategy=dict(STRATEGY),
    parts=(SnapshotPart(rank=0, name="model", digest="00ff", size=20000),),
)


def open_session(tracking: TrackingStore, **changes: Any) -> TuningSession:
    values = {"workload": WORKLOAD, "cluster": CLUSTER, "knob_version": "abc123", "name": "policy"}
    return TuningSession(tracking, **{**values, **changes})


def step_done(step: int, *, loss: float, noise_scale: float | None = None) -> StepDone:
    return StepDone(
        step=step,
        generation=1,
        seconds=0.02,
        split=StepSplit(compute=0.015, communication_exposed=0.005),
        loss=loss,
        wire_bytes={"node": 1024 * step},
        samples=((32 * (step - 1), 32 * step),),
        noise_scale=noise_scale,
        load_balance_error=0.1,
        compute_seconds=(0.015,),
        optimizer_seconds=(0.001,),
        staleness=(0,),
        skipped=0,
        loss_scale=1.0,
        exchange_seconds=0.005,
    )


def evaluated(step: int, *, loss: float) -> Evaluated:
    return Evaluated(step=step, point=HeldOutPoint(seconds=0.02 * step, samples=32 * step, loss=loss))


def snapshot_taken() -> SnapshotTaken:
    return SnapshotTaken(snapshot=SNAPSHOT)


def make_result(**changes: Any) -> TrialResult:
    values = {
        "workload": WORKLOAD.name,
        "cluster": CLUSTER.name,
        "strategy": STRATEGY,
        "world_size": 1,
        "generations": 1,
        "steps": 200,
        "samples": 6400,
        "seconds": 4.0,
        "examples_per_second": 1600.0,
        "examples_per_second_interval": (1500.0, 1700.0),
        "goodput": 1200.0,
        "goodput_interval": (1100.0, 1300.0),
        "goodput_basis": "reference",
        "heldout_curve": (HeldOutPoint(seconds=4.0, samples=6400, loss=2.5),),
        "step_seconds": StepSplit(compute=0.015, communication_exposed=0.005),
        "wire_bytes": {"node": 4096},
        "load_balance_error": 0.125,
    }
    return TrialResult(**{**values, **changes})
