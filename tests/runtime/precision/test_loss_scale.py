"""The loss scale, and what becomes of gradients that are not finite."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.compress import CODECS
from paceline.runtime.compress.base import Layout
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.knobs import config_from, knob_space
from paceline.runtime.precision.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, LossScale
from paceline.runtime.sync.base import flat_exchange

BAD = [math.nan, math.inf, -math.inf]


def scaling() -> LossScale:
    scale = LossScale()
    scale.configure(scales=True, checks=False)
    return scale


def step(scale: LossScale, element: float) -> bool:
    """A step with one gradient."""
    gradient = torch.tensor([1.0, element])
    scale.unscale(gradient)
    return scale.admits([gradient])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1))
def test_scaling_and_unscaling_change_no_bit_of_a_normal_number(values: list[float]) -> None:
    scale, exact = scaling(), torch.tensor(values)
    exact[exact.abs() < 2.0**-100] = 0.0
    gradient = exact * scale.factor
    scale.unscale(gradient)
    assert torch.equal(gradient, exact)


@given(st.lists(st.booleans(), max_size=60))
def test_every_step_that_is_not_finite_is_skipped_and_halves_the_scale_down_to_1(finite: list[bool]) -> None:
    scale = scaling()
    assert [step(scale, 1.0 if each else math.inf) for each in finite] == finite
    assert scale.factor == max(1.0, INITIAL_SCALE / 2 ** finite.count(False))


def test_the_scale_doubles_after_good_steps_in_a_row() -> None:
    scale = scaling()
    scale.load_state({"scale": 8.0, "good_steps": GROWTH_INTERVAL - 2})
    step(scale, 1.0)
    step(scale, math.inf)
    assert scale.state() == {"scale": 4.0, "good_steps": 0}
    scale.load_state({"scale": 4.0, "good_steps": GROWTH_INTERVAL - 1})
    step(scale, 1.0)
    assert scale.state() == {"scale": 8.0, "good_steps": 0}


def test_its_state_is_json_and_survives_recipes_without_it() -> None:
    scale = scaling()
    step(scale, math.inf)
    scale.configure(scales=False, checks=True)
    assert scale.factor == 1.0
    assert not step(scale, math.nan)
    assert step(scale, 1.0)
    restored = scaling()
    restored.load_state(json.loads(json.dumps(scale.state())))
    scale.configure(scales=True, checks=False)
    assert restored.state() == scale.state() == {"scale": INITIAL_SCALE / 2, "good_steps": 0}
    assert restored.factor == INITIAL_SCALE / 2


@pytest.mark.parametrize("bad", BAD)
def test_nothing_is_checked_unless_asked_for(bad: float) -> None:
    scale, gradient = LossScale(), torch.tensor([1.0, bad])
    scale.unscale(gradient)
    assert gradient[0] == 1.0
    assert scale.admits([gradient])


def test_an_overflow_that_no_exchange_showed_halves_the_scale_but_skips_nothing() -> None:
    """As of layers that are not exchanged in this step."""
    scale = scaling()
    scale.unscale(torch.tensor([math.inf]))
    assert scale.admits([torch.ones(3)])
    assert scale.factor == INITIAL_SCALE / 2
    assert scale.admits([torch.ones(3)])
    assert scale.factor == INITIAL_SCALE / 2


LAYOUT: Layout = (("weight", torch.Size([40, 30])), ("bias", torch.Size([30])))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", CODECS.names())
def test_no_codec_hides_that_a_gradient_is_not_finite(alone: dist.ProcessGroup, name: str, bad: float) -> None:
    codec = CODECS.get(name)(config_from(CODECS.get(name).Config, knob_space().default))
    averager = BucketAverager(flat_exchange(codec, alone, ()))
    try:
        results = []
        for element in (1.0, bad, 1.0):
            bucket = torch.randn(1230, generator=torch.Generator().manual_seed(3))
            bucket[7] = element
            averager.begin_step(measure_norms=False)
            scale = scaling()
            bucket.mul_(scale.factor)
            scale.unscale(bucket)
            mean = averager.start(bucket, LAYOUT).wait()
            if scale.admits(mean.split([shape.numel() for _, shape in LAYOUT])):
                averager.commit_step()
                results.append(mean.clone())
            else:
                averager.discard_step()
                assert element is bad
        # The step between has left no trace: what follows is finite again, and so is what is left unsent.
        assert len(results) == 2
        assert all(residual.isfinite().all() for residual in averager.residuals().values())
        assert all(tensor.isfinite().all() for tensor in averager.codec_state()[0].values())
    finally:
        averager.release()
