"""`paceline train`, `serve` and `recommend`."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runtime import workloads
from paceline.runtime.knobs import knob_space
from paceline.tuner.cli.options import CHAMPION
from paceline.tuner.cli.stores import open_policy
from paceline.tuner.cli.train import train
from paceline.tuner.policy.client import PolicyClient
from paceline.tuner.policy.decide import recommend
from paceline.tuner.policy.service import serving
from paceline.tuner.policy.store import StoredPolicy
from paceline.tuner.train import TrainConfig
from tests.tuner.conftest import CommandLine, started
from tests.tuner.policy.simulated import Session


def test_recommend_prints_what_the_policy_answers(
    policy: StoredPolicy, sessions: list[Session], tmp_path: Path, paceline: CommandLine
) -> None:
    cluster = next(each.case.cluster for each in sessions if each.case.cluster.size > 1)
    profile = tmp_path / "cluster.json"
    profile.write_text(json.dumps(dataclasses.asdict(cluster)))
    with serving(policy) as address:
        command = f"recommend digits-cnn --policy {address} --cluster {profile} --seed 3"
        status, output, errors = paceline(f"{command} --json")
        readable = paceline(command)
    expected = recommend(
        policy,
        space=knob_space(),
        workload=workloads.create("digits-cnn").profile("digits-cnn"),
        cluster=cluster,
        trials=(),
        remaining=1,
        seed=3,
        candidates=policy.manifest.candidates,
    )
    assert (status, errors) == (0, "")
    assert json.loads(output) == {
        "workload": "digits-cnn",
        "cluster": cluster.name,
        "strategy": dict(expected.strategy),
        "expected_gain": expected.expected_gain,
        "uncertainty": expected.uncertainty,
        "policy_digest": policy.digest,
    }
    assert readable[0] == 0
    assert readable[1].startswith(expected.strategy.describe(knob_space().default))


@pytest.mark.slow
def test_serve_answers_until_sigterm(folder: Path, policy: StoredPolicy) -> None:
    executable = str(Path(sys.executable).with_name("paceline"))
    port_file = folder.with_name("port")
    command = [executable, "serve", "--policy", str(folder), "--listen", "127.0.0.1:0", "--port-file", str(port_file)]
    with started(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        assert address == f"127.0.0.1:{port_file.read_text().strip()}"
        with PolicyClient(address) as client:
            assert client.describe().digest == policy.digest
        process.terminate()
        assert process.wait() == 0
    assert not port_file.exists()


@pytest.mark.slow
def test_train_registers_what_it_stores(tmp_path: Path, paceline: CommandLine) -> None:
    uri = f"sqlite:///{tmp_path / 'paceline.db'}"
    command = f"train --timesteps 1 --out {tmp_path / 'policy'} --tracking-uri {uri} --json"
    status, output, errors = paceline(command)
    found = json.loads(output)
    assert status == 0
    assert found["model"] == "models:/paceline-policy/1"
    assert CHAMPION in errors
    digests = {open_policy(reference, uri).digest for reference in (CHAMPION, found["model"], str(tmp_path / "policy"))}
    assert digests == {found["policy_digest"]}
    assert found["learning_curve"]["points"][0]["timesteps"] == 0


def test_default_timesteps_are_those_of_the_trainer() -> None:
    assert inspect.signature(train).parameters["timesteps"].default == TrainConfig().timesteps
