"""Codecs in all their settings, and joint codecs that talk to each other without a network."""

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS, BlockCodec, Codec, Joint, JointCodec, Layout


def made(name: str, **settings: Any) -> Any:
    """A codec with some settings changed from their defaults."""
    plugin = CODECS.get(name)
    return plugin(plugin.Config(**settings))


def configured(kind: type[Codec], *, leaving: Container[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and settings of every codec of a kind: the defaults, and what else each knob may be, one at a time.

    Fields named in `leaving` stay at their defaults.
    """
    for name in CODECS.names():
        plugin = CODECS.get(name)
        if issubclass(plugin, kind):
            yield name, {}
            for field in dataclasses.fields(plugin.Config):  # type: ignore[arg-type]
                if field.name not in leaving:
                    others = [value for value in field.metadata["domain"].grid(3) if value != field.default]
                    yield from ((name, {field.name: value}) for value in others)


def ident(value: object) -> str | None:
    """How a parameter of a test is called."""
    if isinstance(value, dict):
        return " ".join(f"{name}={setting}" for name, setting in value.items()) or "default"
    return None


def bucket_of(elements: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: BlockCodec, bucket: Tensor) -> Tensor:
    """What arrives of a bucket."""
    out = torch.zeros_like(bucket)
    codec.decode(codec.encode(bucket), out)
    return out


def converse(
    codecs: Sequence[JointCodec], buckets: Sequence[Tensor], layout: Layout, *, commit: bool = True
) -> tuple[list[Joint], int]:
    """One step of all ranks: what each of them got, and the bytes that each of them sent."""
    talks = []
    for codec, bucket in zip(codecs, buckets, strict=True):
        codec.begin_step()
        codec.note_exchange()
        talks.append(codec.converse(bucket, layout, len(codecs)))
    outcomes: list[Joint] = []
    messages = [next(talk) for talk in talks]
    sent = 0
    while not outcomes:
        assert len({message.shape for message in messages}) == 1
        assert all(message.dtype is torch.float32 for message in messages)
        sent += 4 * messages[0].numel()
        total = torch.stack(messages).sum(0)
        replies = []
        for talk in talks:
            try:
                replies.append(talk.send(total.clone()))
            except StopIteration as over:
                outcomes.append(over.value)
        messages = replies
        assert not (outcomes and messages), "all ranks end in the same round"
    for codec in codecs if commit else ():
        codec.commit_step()
    return outcomes, sent
