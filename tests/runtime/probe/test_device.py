"""What a worker measures of its own device."""

import math

from paceline.proto.paceline.v1 import types_pb2
from paceline.runtime.compress import CODECS
from paceline.runtime.convert import from_message, to_message
from paceline.runtime.domain.cluster import DeviceProfile
from paceline.runtime.worker.device import measure_codecs
from tests.runtime.probe.simulated import two_racks


def test_every_codec_that_changes_anything_is_measured() -> None:
    rates = measure_codecs(1.0, seconds=0.0)
    assert set(rates) == {name for name in CODECS.names() if CODECS.get(name).lossy}
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())


def test_a_share_of_the_processor_is_a_share_of_the_rate() -> None:
    whole, tiny = measure_codecs(1.0, seconds=0.0), measure_codecs(1e-6, seconds=0.0)
    assert all(tiny[name] < 1e-3 * whole[name] for name in whole)


def test_rates_travel_with_the_profile() -> None:
    profile = two_racks().devices[0].profile
    assert profile.codec_rates
    assert from_message(to_message(profile, types_pb2.DeviceProfile), DeviceProfile) == profile
