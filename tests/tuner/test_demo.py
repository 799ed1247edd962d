"""The demo, with budgets as small as they go: from training to the table, and nothing left behind."""

import io
import os
from pathlib import Path

import psutil
import pytest
from pyroute2 import netns
from rich.console import Console

from paceline.tuner.cli.options import CHAMPION
from paceline.tuner.cli.stores import open_policy
from paceline.tuner.demo import DemoConfig, choose_cluster, demo
from paceline.tuner.tracking.store import open_store
from paceline.tuner.train import TrainConfig

CONFIG = DemoConfig(
    cluster="local:2",
    training=TrainConfig(timesteps=1, environments=2, rollout_steps=4, evaluations=1, heldout_sessions=2),
    start_steps=4,
    trial_seconds=0.5,
    trials=2,
    confirm=2,
)


@pytest.mark.slow
def test_demo_trains_serves_tunes_and_prints_the_tables(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    tracking = open_store(f"sqlite:///{tmp_path / 'paceline.db'}")
    output = io.StringIO()
    session = demo(CONFIG, tracking, Console(width=100, file=output))
    text = output.getvalue()
    for expected in ("held-out gain", "what it changes", "recommended: "):
        assert expected in text
    assert ("held-out loss after" in text) == (session.confirmation is not None)

    policy = open_policy(CHAMPION, tracking.uri)
    parent = tracking.client.get_run(str(session.mlflow_run_id))
    assert parent.data.params["policy"] == f"policy {policy.digest[:12]}"
    starts = {
        tracking.client.get_run(str(trial.mlflow_run_id)).data.params["start_snapshot"]
        for trial in (session.reference, *session.trials)
    }
    assert len(starts) == 1
    assert len(session.trials) == CONFIG.trials
    assert set(psutil.Process().children(recursive=True)) <= before


def test_demo_takes_local_workers_where_no_lab_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    cluster, why = choose_cluster()
    assert cluster == "local:4"
    assert "takes root on Linux" in why


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces and cgroups")
def test_demo_takes_the_lab_where_it_can_and_leaves_nothing_of_its_trial() -> None:
    before = netns.listnetns()
    cluster, _ = choose_cluster()
    assert cluster == "lab:two-racks"
    assert netns.listnetns() == before
