"""What codecs send, cost and lose, as far as it is known before a trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.runtime.compress.base import CODECS, BlockCodec, Codec
from paceline.runtime.compress.configs import FeedbackConfig
from paceline.runtime.domain.cluster import DeviceProfile
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.knobs import config_from

MEMORY = "memory"
SCATTER_PASSES = 4.0
"""Memory traffic of adding one sparse payload, in passes over the payload's bytes."""
FEEDBACK_PASSES = 6.0
"""Memory traffic of error feedback but for decoding what was sent, in passes over the fp32 gradient: add the residual,
subtract what was sent, store."""
NO_FEEDBACK_LOSS = 5.0
"""How many times more a biased codec loses when it never sends what it dropped."""
RECODED_LOSS = 1.5
"""How many times more a codec loses where sums are encoded again on their way."""
SPARSE_RECODED_LOSS = 3.0
"""The same of a sparse one: a sum of n payloads has up to n times as many elements."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is assumed of a codec.

    Losses are on the scale of `Demand.information_loss` with error feedback where the codec has it. One unit is what
    sending a tenth of the elements, those of largest magnitude, loses. From the codecs' contraction bounds and the
    relative order of the losses in Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine
    Learning" (ICDCS 2021); how much a unit costs a workload is one of the simulator's unknowns.
    """

    passes: float
    """Memory traffic of encoding and decoding, in passes over the fp32 gradient, where no probe has measured it."""
    loss: float = 0.0
    """What rounding loses, whatever the knobs."""
    loss_per_decade: float = 0.0
    """What each factor of ten between the elements and those sent loses."""
    sparse: bool = False
    """Whether indices travel with the values: a payload then holds half as many elements as numbers, and is decoded
    at the cost of the payload, not of the gradient."""
    rounds: int = 1
    """Sums that a bucket takes, one after the other."""
    by_payload: bool = False
    """Whether encoding takes as many times longer than at the default knobs as the payload is larger."""


PRIORS = {
    "none": Prior(passes=0.0),
    # Relative errors of 2^-11 and 2^-8, and 2^-8 of the block's largest; 2^-4 of each element.
    "fp16": Prior(passes=3.0, loss=0.1),
    "bf16": Prior(passes=3.0, loss=0.1),
    "int8": Prior(passes=12.0, loss=0.2),
    "fp8": Prior(passes=16.0, loss=0.3),
    # Keeps 2/pi of a normal gradient's square norm.
    "sign": Prior(passes=16.0, loss=0.8),
    "topk": Prior(passes=40.0, loss_per_decade=1.0, sparse=True),
    # Keeps as small a part of the square norm as of the elements, where the largest ones hold most of it.
    "randomk": Prior(passes=8.0, loss_per_decade=2.0),
    # Gradient matrices are nearly of low rank.
    "powersgd": Prior(passes=12.0, loss_per_decade=0.5, rounds=2, by_payload=True),
}
OTHERS = Prior(passes=16.0, loss=0.1, loss_per_decade=1.0)
"""The same of any other codec."""


class Sums(NamedTuple):
    """How a codec's buckets are added up over ranks."""

    joint: bool
    """Whether ranks encode in agreement, so that whatever they send is added up on the wire."""
    linear: bool
    """Whether payloads can be."""
    owners: bool
    """Whether a flat exchange sums at owners."""
    faithful: bool
    """Whether a sum is encoded even where error feedback cannot make good what that drops."""


class Message(NamedTuple):
    """What a rank has to exchange, encoded in a number of buckets."""

    payload: float
    """Bytes of all buckets, encoded."""
    encode_seconds: float
    """Time of encoding all buckets on the slowest device, s; of decoding, too, where ranks encode in agreement."""
    decode_seconds: float
    """Time of decoding one payload of each bucket, s."""
    feedback_seconds: float
    """Time of error feedback but for decoding, s."""
    residual: float
    """Memory of the residual, B."""
    rounds: float
    """Sums that a bucket takes, one after the other."""
    sums: Sums
    """How it is added up over ranks."""
    information_loss: float
    """As in Demand, where sums are not encoded again."""
    recoded_loss: float
    """As in Demand, where they are."""


def slowest_rates(devices: Sequence[DeviceProfile]) -> dict[str, float]:
    """Rates of the slowest device, B/s: memory traffic under MEMORY, encoding and decoding under a codec's name."""
    rates = {MEMORY: min(device.mem_bw for device in devices)}
    for name in CODECS.names():
        passes = PRIORS.get(name, OTHERS).passes
        if passes:
            rates[name] = min(device.codec_rates.get(name) or device.mem_bw / passes for device in devices)
    return rates


def message(workload: WorkloadProfile, rates: Mapping[str, float], strategy: Strategy, buckets: int) -> Message:
    """What `compress.*` and the number of buckets decide. A codec that is not registered here counts as none."""
    name = str(strategy["compress.codec"])
    plugin = CODECS.get(name if name in CODECS.names() else "none")
    config = config_from(plugin.Config, strategy)
    codec, prior = plugin(config), PRIORS.get(plugin.name, OTHERS)
    block = codec if isinstance(codec, BlockCodec) else None
    gradient = workload.gradient_bytes
    payload = _payload(workload, codec, buckets)
    seconds = gradient / rates[plugin.name] if codec.lossy else 0.0
    if prior.by_payload:
        seconds *= payload / _payload(workload, plugin(plugin.Config()), buckets)
    encode, decode = seconds / 2, seconds / 2
    if prior.sparse:
        encode, decode = seconds, SCATTER_PASSES * payload / rates[MEMORY]
    elif block is None:
        encode, decode = seconds, 0.0
    loss = prior.loss
    if prior.loss_per_decade:
        kept = min(1.0, payload / gradient / (2 if prior.sparse else 1))
        loss -= prior.loss_per_decade * math.log10(kept)
    if isinstance(config, FeedbackConfig) and not config.error_feedback:
        loss *= NO_FEEDBACK_LOSS
    residual = gradient * codec.error_feedback
    return Message(
        payload=payload,
        encode_seconds=encode,
        decode_seconds=decode,
        feedback_seconds=FEEDBACK_PASSES * residual / rates[MEMORY],
        residual=residual,
        rounds=prior.rounds,
        sums=(
            Sums(joint=True, linear=True, owners=False, faithful=False)
            if block is None
            else Sums(joint=False, linear=block.linear, owners=block.sums_at_owners, faithful=block.faithful)
        ),
        information_loss=loss,
        recoded_loss=loss * (SPARSE_RECODED_LOSS if prior.sparse else RECODED_LOSS),
    )


MOST_SHAPES = 1000
"""Tensors of a bucket that a joint codec is asked about; of more, an equal part of them."""


def _payload(workload: WorkloadProfile, codec: Codec, buckets: int) -> int:
    """Bytes of so many buckets of about equal size, encoded."""
    elements, larger = divmod(workload.parameters, buckets)
    if isinstance(codec, BlockCodec):
        return larger * codec.payload_bytes(elements + 1) + (buckets - larger) * codec.payload_bytes(elements)
    # A profile that somebody sends may have fewer parameters than tensors.
    tensors = max(1, min(workload.parameter_tensors // buckets, elements))
    listed = min(tensors, MOST_SHAPES)
    part = codec.bucket_bytes(_shapes(elements * listed // tensors, listed))
    return buckets * part * tensors // listed


def _shapes(elements: int, tensors: int) -> list[torch.Size]:
    """Shapes of about equal, square matrices with so many elements in all; what is left over is a vector."""
    average = max(1, elements // tensors)
    rows = math.isqrt(average)
    columns = average // rows
    return [*[torch.Size([rows, columns])] * tensors, torch.Size([elements - tensors * rows * columns])]
