"""A small language model over the bytes of the running Python's own standard library."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.runtime.workloads.base import WORKLOADS, Workload

VOCABULARY = 256
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"})
"""`encodings` and `pydoc_data` are generated: files that repeat each other would leak into the held-out set."""
FILE_BYTES = 32 * 1024
"""Bytes taken of each file: enough text for millions of tokens, quick to read, no file dominates."""
HELDOUT_WINDOWS = 256
"""Few, so that an evaluation costs about as much as three training steps."""
INITIAL_STD = 0.05
"""Larger than GPT-2's 0.02, for small widths: the loss leaves the plateau of byte frequencies much earlier."""


@WORKLOADS.register
class BytesLM(Workload):
    """Next-byte prediction by a pre-norm decoder-only transformer (Radford et al., GPT-2) with AdamW.

    A sample is a window of `context` + 1 bytes of the `.py` files of the standard library; windows do not
    overlap. About one file in twenty, chosen by a hash of its relative path, is held out.
    """

    name = "bytes-lm"
    doc = "Decoder-only transformer over the bytes of the running Python's standard library sources."
    variants = {  # noqa: RUF012
        "small": {"width": 128, "layers": 4, "context": 64, "global_batch": 32, "learning_rate": 2e-3},
        "tiny": {"width": 64, "layers": 2, "context": 32, "global_batch": 16, "learning_rate": 4e-3},
        "medium": {"width": 256, "layers": 4, "context": 64, "global_batch": 32, "learning_rate": 1e-3},
    }

    def __init__(self, *, width: int, layers: int, context: int, global_batch: int, learning_rate: float) -> None:
        """Build `layers` blocks of `width` channels (a multiple of 32) over windows of `context`+1 bytes."""
        self._width, self._layers, self._context = width, layers, context
        self._global_batch = global_batch
        self._learning_rate = learning_rate
        train, held = _standard_library_windows(context + 1)
        self._windows = {False: train, True: held[:: len(held) // HELDOUT_WINDOWS][:HELDOUT_WINDOWS]}

    @property
    def global_batch(self) -> int:
        """Windows per optimizer step."""
        return self._global_batch

    @property
    def train_samples(self) -> int:
        """Windows of the training files."""
        return len(self._windows[False])

    @property
    def heldout_samples(self) -> int:
        """256, evenly spaced over the held-out files."""
        return len(self._windows[True])

    def model(self) -> nn.Module:
        """A new transformer with heads of 32 channels."""
        return ByteTransformer(width=self._width, layers=self._layers, context=self._context)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW, fused: the loop over small tensors would cost a tenth of a step."""
        return torch.optim.AdamW(parameters, lr=self._learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def batch(self, indices: Tensor, *, heldout: bool = False) -> Tensor:
        """Windows, int64, shape [b, context + 1]."""
        return self._windows[heldout][indices].long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, nats."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def flops_per_sample(self) -> float:
        """Per token, 6 per block weight and output weight, and 12 x context x width per layer for attention.

        The count of Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
        """
        weights = 12 * self._layers * self._width**2 + VOCABULARY * self._width
        attention = 12 * self._layers * self._context * self._width
        return float((6 * weights + attention) * self._context)


def _standard_library_windows(length: int) -> tuple[Tensor, Tensor]:
    """Training and held-out windows, uint8, shape [n, length] each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in _sources(root):
        held = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()[0] < 256 // 20
        with path.open("rb") as file:
            texts[held].append(file.read(FILE_BYTES))
    return _windows(b"".join(texts[False]), length), _windows(b"".join(texts[True]), length)


def _sources(root: Path) -> list[Path]:
    found = []
    for folder, children, names in os.walk(root):
        children[:] = set(children) - SKIPPED_FOLDERS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _windows(text: bytes, length: int) -> Tensor:
    count = len(text) // length
    return torch.from_numpy(np.frombuffer(text, np.uint8, count * length).reshape(count, length).copy())


class ByteTransformer(nn.Module):
    """Byte ids [b, t] to logits [b, t, 256]. Learned positions; the output shares the embedding's weight."""

    def __init__(self, *, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        blocks = [Block(width) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)
        for block in blocks:
            for output in (block.attention_out, block.mlp_out):
                nn.init.normal_(output.weight, std=INITIAL_STD / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each position."""
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape [b, t, width] to the same shape."""
        projected = self.attention_in(self.attention_norm(hidden)).unflatten(2, (3, self.heads, 32))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + changed
