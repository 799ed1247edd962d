"""A small residual CNN on scikit-learn's handwritten digits."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.runtime.workloads.base import WORKLOADS, Workload

HELDOUT_STRIDE = 5
WIDTH = 32


@WORKLOADS.register
class DigitsCNN(Workload):
    """Classification of handwritten digits by a pre-activation ResNet (arXiv:1603.05027) with SGD.

    GroupNorm instead of BatchNorm, so the model has no running statistics to synchronise. Every fifth image
    is held out.
    """

    name = "digits-cnn"
    doc = "Residual CNN on scikit-learn's 8x8 images of handwritten digits."

    def __init__(self) -> None:
        images, labels = _digits()
        held = torch.arange(len(labels)) % HELDOUT_STRIDE == 0
        self._data = {heldout: (images[held == heldout], labels[held == heldout]) for heldout in (False, True)}

    @property
    def global_batch(self) -> int:
        """64 images."""
        return 64

    @property
    def train_samples(self) -> int:
        """Images that are trained on."""
        return len(self._data[False][1])

    @property
    def heldout_samples(self) -> int:
        """Images that are not."""
        return len(self._data[True][1])

    def model(self) -> nn.Module:
        """A new network of 32 channels: one residual block at 8x8, two at 4x4, a linear classifier."""
        return nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1, bias=False),
            ResidualBlock(),
            nn.MaxPool2d(2),
            ResidualBlock(),
            ResidualBlock(),
            nn.GroupNorm(8, WIDTH),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * WIDTH, 10),
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)

    def batch(self, indices: Tensor, *, heldout: bool = False) -> tuple[Tensor, Tensor]:
        """Images (fp32 in [0, 1], shape [b, 1, 8, 8]) and labels (int64, shape [b])."""
        images, labels = self._data[heldout]
        return images[indices], labels[indices]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy over ten classes, nats."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def flops_per_sample(self) -> float:
        """6 per weight of a convolution and output pixel, and per weight of the classifier."""
        block = 2 * 9 * WIDTH**2
        return 6.0 * (64 * (9 * WIDTH + block) + 16 * 2 * block + 10 * 16 * WIDTH)


def _digits() -> tuple[Tensor, Tensor]:
    """Images and labels as `sklearn.datasets.load_digits` gives them.

    Its file is read directly: importing scikit-learn and SciPy would take every worker seconds.
    """
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    rows = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", np.int64, delimiter=",")
    pixels = torch.from_numpy(rows[:, :-1].astype(np.float32) / 16)
    return pixels.view(-1, 1, 8, 8), torch.from_numpy(rows[:, -1].copy())


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each after GroupNorm and ReLU, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (
                    nn.GroupNorm(8, WIDTH),
                    nn.ReLU(),
                    nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
                )
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Shape [b, 32, 8, 8] to the same shape."""
        out: Tensor = images + self.layers(images)
        return out
