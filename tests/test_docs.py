"""The code in the documentation runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TRAIN = """
import torch
from paceline.runtime import workloads

workloads.register_class("my_models:Linear")
assert {"linear", "linear/small", "linear/large"} <= set(workloads.references())
workload = workloads.create("linear")
model = workload.model()
optimizer = workload.optimizer(model.parameters())
heldout = workload.batch(torch.arange(workload.heldout_samples), heldout=True)
losses = [float(workload.loss(model, heldout))]
for step in range(20):
    workload.loss(model, workload.batch(torch.arange(64) + 64 * step)).backward()
    optimizer.step()
    optimizer.zero_grad()
losses.append(float(workload.loss(model, heldout)))
assert losses[1] < losses[0]
print(workload.profile("linear").parameters)
"""


def test_workload_of_the_task_page_trains(tmp_path: Path) -> None:
    page = (DOCS / "add-a-workload.md").read_text()
    code = re.search(r"```python\n# my_models\.py\n(.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "my_models.py").write_text(code[1])
    command = [sys.executable, "-c", TRAIN]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "650\n"), done.stderr


def python_blocks(page: Path) -> list[str]:
    """The Python code of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.slow
def test_code_of_the_readme_runs_and_switches_live() -> None:
    outputs = []
    for code in python_blocks(ROOT / "README.md"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert re.search(r"from step 0 default\nfrom step \d+ sync\.mode=local_sgd\n", outputs[0])
