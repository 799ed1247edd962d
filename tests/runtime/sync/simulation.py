"""What modes that average parameters should compute, written down a second time, for all replicas in one process.

Nothing here is the runtime's: each replica is a copy of the model with an optimizer of its own, and the outer optimizer
is torch's over copies of the parameters.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.runtime import workloads
from paceline.runtime.samples import SampleStream

Range = tuple[int, int]
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Parameters that are averaged together."""

    names: tuple[str, ...]
    steps: tuple[int, ...]
    """Steps after which their averaging starts."""
    delay: int = 0


class Simulation:
    """All replicas of a trial of `regression/momentum` with seed 0."""

    def __init__(
        self,
        fragments: Sequence[Fragment],
        *,
        groups: Sequence[int] = (0, 1, 2, 3),
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        """`groups` says which ranks share a gradient."""
        self._workload = workloads.create("regression/momentum")
        self._stream = SampleStream(self._workload.train_samples, 0)
        torch.manual_seed(int(np.random.SeedSequence((0,)).generate_state(1, np.uint64)[0]))
        first = self._workload.model()
        self._fragments, self._groups = fragments, groups
        self._models = [copy.deepcopy(first) for _ in groups]
        self._inner = [self._workload.optimizer(model.parameters()) for model in self._models]
        self._anchors = dict(copy.deepcopy(first).named_parameters())
        momentum = {"momentum": outer_momentum, "nesterov": True} if outer_momentum else {}
        self._outer = {
            name: torch.optim.SGD([anchor], lr=outer_lr, **momentum) for name, anchor in self._anchors.items()
        }
        self._arriving: dict[int, list[tuple[Fragment, Weights, list[Weights]]]] = {}

    def step(self, number: int, samples: Sequence[Range]) -> None:
        """One step of the trial on these positions of the sample stream, by rank."""
        counts = [stop - start for start, stop in samples]
        losses = [
            self._workload.loss(model, self._workload.batch(self._stream.indices(*each)))
            for model, each in zip(self._models, samples, strict=True)
        ]
        gradients = [
            torch.autograd.grad(loss, list(model.parameters()))
            for loss, model in zip(losses, self._models, strict=True)
        ]
        for rank, (model, optimizer) in enumerate(zip(self._models, self._inner, strict=True)):
            mine = [peer for peer, group in enumerate(self._groups) if group == self._groups[rank]]
            total = sum(counts[peer] for peer in mine)
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.stack([gradients[peer][index] * counts[peer] / total for peer in mine]).sum(0)
            optimizer.step()
        for fragment, change, starts in self._arriving.pop(number, []):
            self._apply(fragment, change, starts)
        for fragment in self._fragments:
            if number in fragment.steps:
                starts = [self._weights(rank, fragment) for rank in range(len(self._models))]
                change = {name: self._anchors[name].detach() - self._mean(name, counts) for name in fragment.names}
                if fragment.delay:
                    self._arriving.setdefault(number + fragment.delay, []).append((fragment, change, starts))
                else:
                    self._apply(fragment, change, starts)

    def weights(self, rank: int) -> Weights:
        """A replica as it is."""
        return {name: parameter.detach().clone() for name, parameter in self._models[rank].named_parameters()}

    def _weights(self, rank: int, fragment: Fragment) -> Weights:
        return {name: value for name, value in self.weights(rank).items() if name in fragment.names}

    def _mean(self, name: str, counts: Sequence[int]) -> Tensor:
        """Over groups, each as heavy as its samples are many; all replicas of a group are alike."""
        values = [dict(model.named_parameters())[name].detach() for model in self._models]
        sizes = [self._groups.count(group) for group in self._groups]
        totals = [
            sum(count for count, other in zip(counts, self._groups, strict=True) if other == group)
            for group in self._groups
        ]
        weighed = [value * total / size for value, total, size in zip(values, totals, sizes, strict=True)]
        return torch.stack(weighed).sum(0) / sum(counts)

    @torch.no_grad()
    def _apply(self, fragment: Fragment, change: Weights, starts: Sequence[Weights]) -> None:
        for name in fragment.names:
            self._anchors[name].grad = change[name]
            self._outer[name].step()
            for model, start in zip(self._models, starts, strict=True):
                parameter = dict(model.named_parameters())[name]
                parameter.copy_(parameter + (self._anchors[name] - start[name]))
