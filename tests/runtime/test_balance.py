"""When shares are planned anew, and when the links are measured again."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Tier
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.trial import StepSplit
from paceline.runtime.mapping.base import round_shares
from paceline.runtime.measure import StepReport
from paceline.runtime.server.balance import BalanceConfig, LoadWatch, with_speeds
from paceline.runtime.server.link_use import LinkUse, LinkWatch

BATCH = 64
CONFIG = BalanceConfig()


def step(compute: Sequence[float], *, fixed: float = 0.0, seconds: float | None = None) -> StepDone:
    return StepDone(
        step=1, generation=1, seconds=seconds or max(compute), split=StepSplit(), loss=0.0, wire_bytes={}, samples=(),
        noise_scale=None, load_balance_error=0.0, compute_seconds=tuple(compute),
        optimizer_seconds=(fixed,) * len(compute), staleness=(), skipped=0, loss_scale=1.0,
        exchange_seconds=0.0,
    )  # fmt: skip


def train(
    speeds: Sequence[float], shares: Sequence[int], steps: int, *, noise: float = 0.0, seed: int = 0
) -> list[tuple[int, tuple[float, ...]]]:
    """Steps at which a watch asked for new shares, with the speeds it found; each time it gets a new plan."""
    rng = np.random.default_rng(seed)
    watch, asked, shares = LoadWatch(shares), [], tuple(shares)
    for number in range(steps):
        compute = [
            share / speed * (1 + noise * rng.standard_normal()) for share, speed in zip(shares, speeds, strict=True)
        ]
        if found := watch.add(step(compute)):
            asked.append((number, found))
            shares = round_shares(found, BATCH)
            watch = LoadWatch(shares)
    return asked


@given(st.integers(0, 10**6))
def test_noise_of_two_percent_never_counts(seed: int) -> None:
    assert train([32.0] * 4, [16] * 4, 200, noise=0.02, seed=seed) == []


@pytest.mark.parametrize("factor", [0.8, 0.5, 0.25, 1.5, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_device_whose_speed_moves_counts_once(factor: float, noise: float) -> None:
    asked = train([32.0, 32.0, 32.0 * factor, 32.0], [16] * 4, 200, noise=noise)
    ((_, speeds),) = asked
    assert speeds[2] / speeds[0] == pytest.approx(factor, rel=0.1)


def test_it_counts_within_the_window() -> None:
    (number, _), *_ = train([32.0, 32.0, 16.0, 32.0], [16] * 4, 50)
    # Steps of one second: the first that fill the window decide.
    assert number + 1 == max(CONFIG.window_steps, CONFIG.window_seconds)


def test_a_shift_that_does_not_last_does_not_count() -> None:
    watch = LoadWatch([16] * 4)
    for number in range(100):
        slow = 2.0 if number % 20 < 3 else 1.0
        assert watch.add(step([0.5, 0.5, 0.5 * slow, 0.5], seconds=0.9)) is None


def test_shares_that_rounding_would_not_improve_stay() -> None:
    """Two samples per rank: nothing can be taken from a rank that is a fifth slower."""
    watch = LoadWatch([2, 2, 2, 2])
    assert all(watch.add(step([0.8, 0.8, 1.0, 0.8])) is None for _ in range(50))


def test_time_that_does_not_depend_on_samples_is_planned_for() -> None:
    """A slow device spends as much more on its optimizer step: what is left is shared, and that ends it."""
    speeds, overhead = [1.0, 1.0, 0.5, 0.25], 0.2
    shares: tuple[int, ...] = round_shares([1.0] * 4, BATCH)
    plans = 0
    for _ in range(3):
        watch = LoadWatch(shares)
        for _ in range(20):
            compute = [(overhead + share / 40) / speed for share, speed in zip(shares, speeds, strict=True)]
            fixed = [overhead / speed for speed in speeds]
            done = dataclasses.replace(step(compute), optimizer_seconds=tuple(fixed))
            if found := watch.add(done):
                shares, plans = round_shares(found, BATCH), plans + 1
                break
    assert plans == 1
    times = [(overhead + share / 40) / speed for share, speed in zip(shares, speeds, strict=True)]
    assert max(times) / statistics.fmean(times) < 1.1


def test_what_the_probe_got_wrong_is_put_right_once() -> None:
    """An eighth less than the plan thinks: too little to count later on, but not at the start."""
    speeds, shares = [32.0, 32.0, 28.0, 32.0], (16, 16, 16, 16)
    watch = LoadWatch(shares, calibrates=True)
    compute = [share / speed for share, speed in zip(shares, speeds, strict=True)]
    found = [watch.add(step(compute, seconds=1.0)) for _ in range(50)]
    assert found[CONFIG.window_steps - 1] == pytest.approx(speeds)
    assert found.count(None) == 49


def cluster(flops: Sequence[float]) -> Cluster:
    devices = tuple(
        Device(
            name=f"d{index}",
            node=f"n{index}",
            kind="cpu",
            profile=DeviceProfile(flops=each, mem_bw=1e9, net_latency=0.0, pcie_bw=0.0, memory=1e9),
        )
        for index, each in enumerate(flops)
    )
    return Cluster(name="test", devices=devices, links=())


def test_the_profile_keeps_its_median_and_takes_the_ratios() -> None:
    found = with_speeds(cluster([1e9, 1e9, 1e9, 5e8]), (3, 2, 1, 0), (10.0, 20.0, 10.0, 20.0))
    assert [device.profile.flops for device in found.devices] == pytest.approx([1e9, 5e8, 1e9, 5e8])


def report(rank: int, sent: dict[str, int]) -> StepReport:
    return StepReport(
        step=1, generation=1, rank=rank, seconds=1.0, split=StepSplit(), optimizer_seconds=0.0, loss=0.0,
        sample_start=0, sample_stop=1, wire_bytes=sent, local_square_norm=None, mean_square_norm=None,
    )  # fmt: skip


def test_utilisation_is_that_of_the_busiest_way_out() -> None:
    nodes = Tier(name="node", groups=((0,), (1,), (2, 3)), uplinks=(100.0, 100.0, 400.0))
    racks = Tier(name="rack", groups=((0, 1), (2, 3)), uplinks=(50.0, 10.0))
    use = LinkUse((nodes, racks))
    assert use.utilisation == {}
    sent = [{"rack": 10, "cluster": 5}, {}, {"node": 1000}, {"cluster": 8}]
    # Rank 0 runs on device 3, rank 1 on 2, and so on.
    use.add((3, 2, 1, 0), [report(rank, each) for rank, each in enumerate(sent)])
    # Node of device 0: 8 of 100; of devices 2 and 3: 15 of 400. Rack of 0 and 1: 8 of 50; of 2 and 3: 5 of 10.
    assert use.utilisation == {"node": 0.08, "rack": 0.5}


@given(st.lists(st.floats(0.8, 1.2), min_size=60, max_size=60))
def test_exchanges_that_vary_do_not_count_as_a_shift(rates: list[float]) -> None:
    watch = LinkWatch()
    assert not any(watch.add(1.0, 1000, 1 / rate) for rate in rates)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_link_whose_rate_moves_counts(factor: float) -> None:
    watch = LinkWatch()
    assert not any(watch.add(1.0, 1000, 1.0) for _ in range(20))
    assert any(watch.add(1.0, 1000, 1 / factor) for _ in range(20))


def test_steps_without_exchange_say_nothing() -> None:
    watch = LinkWatch()
    assert not any(watch.add(1.0, 0, 0.0) for _ in range(100))
