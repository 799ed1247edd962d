"""The state of one rank as tensors and JSON: what snapshots store and peers hand over."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """Everything a rank needs to go on exactly where it was."""

    parts: dict[str, dict[str, Tensor]]
    """Part name (`model`, `optimizer`, `sync`, `residuals`, `codec`, `rng`) -> tensor name -> tensor."""
    numbers: dict[str, Any]
    """JSON-able rest: optimizer hyper-parameters, sync mode and phase, step and cursor."""

    def clone(self) -> "ReplicaState":
        """A copy that later steps do not change."""
        copies = {
            part: {name: tensor.clone() for name, tensor in tensors.items()} for part, tensors in self.parts.items()
        }
        return ReplicaState(parts=copies, numbers=json.loads(json.dumps(self.numbers)))

    def to_bytes(self) -> bytes:
        """One safetensors blob, for a peer."""
        tensors = {
            # Cloned, as safetensors refuses tensors that share memory, such as tied weights.
            f"{part}/{name}": tensor.contiguous().clone()
            for part, named in self.parts.items()
            for name, tensor in named.items()
        }
        return save(tensors, metadata={"numbers": json.dumps(self.numbers), "parts": json.dumps([*self.parts])})

    @classmethod
    def from_bytes(cls, blob: bytes) -> "ReplicaState":
        """Read what `to_bytes` wrote."""
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in json.loads(header["parts"])}
        for key, tensor in load(blob).items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return cls(parts=parts, numbers=json.loads(header["numbers"]))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict: parameters and persistent buffers, detached, not copied."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors, named `<parameter index>.<key>`, and the JSON-able rest of its state dict."""
    state = optimizer.state_dict()
    tensors, scalars = {}, {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach()
            else:
                scalars[f"{index}.{key}"] = value
    return tensors, {"param_groups": state["param_groups"], "scalars": scalars}


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Undo `optimizer_state`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *rest["scalars"].items()]:
        index, _, key = name.partition(".")
        # load_state_dict may keep a tensor as it is, and the optimizer then updates it in place.
        state.setdefault(int(index), {})[key] = value.clone() if isinstance(value, Tensor) else value
    optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})
