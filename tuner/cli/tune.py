"""`paceline tune`: a few live trials, then a recommendation."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.tuner.cli.options import (
    CHAMPION,
    EmbeddedCluster,
    Json,
    NoTracking,
    RuntimeAddress,
    TrackingUri,
    WorkloadName,
)
from paceline.tuner.cli.run import DEFAULT_STEPS, TRIAL_FAILED

if TYPE_CHECKING:
    from paceline.runtime.api import RuntimeAPI
    from paceline.runtime.domain.events import TrialEvent
    from paceline.runtime.domain.knobs import KnobSpace
    from paceline.runtime.domain.trial import TrialResult, TrialSpec
    from paceline.tuner.policy.client import PolicyClient
    from paceline.tuner.policy.store import StoredPolicy
    from paceline.tuner.tune import Advisor, TuningResult


def tune(
    workload: WorkloadName,
    *,
    runtime: RuntimeAddress = None,
    cluster: EmbeddedCluster = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="URI|DIR|HOST:PORT|NAME",
            help="What chooses the trials: a registered, stored or served policy, or planner, default or random. "
            f"{CHAMPION} if left out, or the planner where that is not registered.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Trials at most, the reference trial not counted.")] = 6,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help=f"Optimizer steps of a trial; {DEFAULT_STEPS} if --seconds is not given either."),
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Training time of a trial, s.")] = None,
    confirm: Annotated[
        int, typer.Option("--confirm", help="Pairs of runs that the best candidate and the default end with.")
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, sample order and candidates.")] = 0,
    json_output: Json = False,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
) -> int:
    """Find a strategy for WORKLOAD in a few live trials. Exits with 1 when the reference trial failed.

    What is recommended has beaten the default strategy in alternating runs, or is the default.
    """
    from rich.console import Console

    from paceline.runtime.domain.trial import Budget
    from paceline.tuner import tune
    from paceline.tuner.cli.stores import open_tracking
    from paceline.tuner.cli.target import find_runtime
    from paceline.tuner.tuning_report import print_session, session_as_json

    if steps is None and seconds is None:
        steps = DEFAULT_STEPS
    budget = Budget(steps=steps, seconds=seconds)
    config = tune.TuneConfig(budget=budget, trials=trials, confirm=confirm, seed=seed)
    target = find_runtime(runtime, cluster)
    default = target.strategy(workload)
    tracking = None if no_tracking else open_tracking(tracking_uri)
    if policy is None and tracking is None:
        policy = "planner"
        print("without tracking, no policy is looked up: the planner chooses the trials", file=sys.stderr)
    with open_advisor(policy, target.space, seed=seed, tracking_uri=tracking_uri) as advisor, target.open() as opened:
        session = tune.tune(
            opened, target.profile(workload), config, advisor=advisor, watch=watch_titled, tracking=tracking
        )
    if json_output:
        print(json.dumps(session_as_json(session), allow_nan=False))
    else:
        print_session(session, default, Console())
    return status_of(session)


def status_of(session: "TuningResult") -> int:
    """The exit status, and a line on stderr where it is not 0."""
    reference = session.reference.result
    if reference.failure is None:
        return 0
    print(f"paceline: the reference trial failed ({reference.failure}): {reference.message}", file=sys.stderr)
    return TRIAL_FAILED


def watch_titled(
    title: str, runtime: "RuntimeAPI", spec: "TrialSpec", log_event: "Callable[[TrialEvent], None]"
) -> "TrialResult":
    """`watch`, under a line that says which trial it is."""
    from paceline.tuner.cli.progress import watch

    print(title, file=sys.stderr)
    return watch(runtime, spec, log_event)


@contextmanager
def open_advisor(
    reference: str | None, space: "KnobSpace", *, seed: int, tracking_uri: str | None
) -> "Iterator[Advisor]":
    """What a `--policy` stands for; None: the champion, or the planner where there is none.

    Raises UnknownName, InvalidRequest for a policy of another knob space, and what loading or asking it raises.
    """
    from paceline.tuner.policy.client import PolicyClient
    from paceline.tuner.policy.decide import DefaultPolicy, PlannerPolicy, RandomPolicy, recommend
    from paceline.tuner.tune import Advisor

    baselines = {policy.name: policy for policy in (PlannerPolicy(), DefaultPolicy(), RandomPolicy(seed))}
    stored = _stored_policy(reference, tracking_uri)
    if stored is not None:
        stored.require(space)
        ask = partial(recommend, stored, candidates=stored.manifest.candidates)
        yield Advisor(name=f"policy {stored.digest[:12]}", ask=ask)
    elif reference is None or reference in baselines:
        policy = baselines[reference or "planner"]
        yield Advisor(name=policy.name, ask=partial(recommend, policy))
    elif ":" in reference:
        with PolicyClient(reference) as client:
            yield served_advisor(client, space)
    else:
        raise UnknownName("policy", reference, baselines)


def _stored_policy(reference: str | None, tracking_uri: str | None) -> "StoredPolicy | None":
    """The policy, if the reference is that of a stored one; without a reference, the champion, if there is one."""
    from paceline.tuner.cli.stores import open_policy

    if reference is not None:
        is_stored = "/" in reference or Path(reference).is_dir()
        return open_policy(reference, tracking_uri) if is_stored else None
    try:
        return open_policy(CHAMPION, tracking_uri)
    except UnknownName:
        print(f"{CHAMPION} is not registered: the planner chooses (`paceline train` registers one)", file=sys.stderr)
        return None


def served_advisor(client: "PolicyClient", space: "KnobSpace") -> "Advisor":
    """A policy server. Raises Unreachable, and InvalidRequest for a policy of another knob space."""
    from paceline.tuner.tune import Advisor

    served = client.describe()
    if served.knob_version != space.version:
        raise InvalidRequest(
            f"the policy at {client.address} was trained for knob space {served.knob_version}, not {space.version}; "
            "serve one for it, or use --policy planner"
        )
    return Advisor(name=f"{served.name} {served.digest[:12]}", ask=client.recommend)
