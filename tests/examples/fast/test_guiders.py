"""Guided steps are diffusers' guiders, step by step, and a skipped layer is its hook's."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.scan import Layers
from maxattn_examples.fast.reuse import skipping
from maxattn_examples.fast.settings import FastSettings, GuidanceSettings
from maxattn_examples.samplers import flow_euler
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.sizes import Sizes
from safetensors.numpy import load_file

from maxattn import weights
from tests.closeness import distance
from tests.examples.fast.walks import Run
from tests.examples.parity import channels_last, channels_second, fixture, part
from tests.fixtures import make_diffusers
from tests.fixtures import make_guiders as made

CASES = made.cases()


def model(x: Any, t: Any, what: float, around: Any = None) -> Any:
    """The stand-in of the fixture, its layers inside a hook."""
    t = t[0]

    def run(x: Any, span: range) -> Any:
        for number in span:
            x = made.layer(x, number, t, what, jnp)
        return x

    return (around or Layers.all)(Layers(len(made.STRENGTHS), run), jnp.sin(x))


def compare(name: str, noise: np.ndarray, theirs: np.ndarray) -> None:
    case = CASES[name]
    fast = FastSettings(guidance=GuidanceSettings(**case.settings))
    schedule = flow_euler.schedule(case.steps, made.SHIFT)
    scale = case.options["guidance_scale"]
    run = Run(model, len(made.STRENGTHS), made.TEXTS)
    ours = list(run.samples(fast, schedule, jnp.asarray(noise), scale))
    for i, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert distance(got, want) <= 5e-6, f"step {i}"


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_diffusers(name: str) -> None:
    theirs = load_file(Path(made.__file__).parent / "diffusers_guiders.safetensors")
    compare(name, theirs["noise"], theirs[name])


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_diffusers_live(name: str) -> None:
    for package in ("torch", "diffusers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    noise = made.first()
    compare(name, noise.numpy(), made.run(CASES[name], noise).numpy())


@pytest.mark.parametrize("scan", [True, False])
def test_a_model_that_skips_a_layer_is_diffusers(scan: bool) -> None:
    theirs = fixture("wan_t2v")
    sizes = Sizes(**make_diffusers.MODEL)
    ours = WanTransformer3D(sizes, rngs=nnx.Rngs(0), scan_layers=scan)
    weights.load_diffusers(ours, part(theirs, "weights."))
    x, text = channels_last(theirs["in.x"]), jnp.asarray(theirs["in.text"])
    call = nnx.jit(partial(ours, around=skipping([made.SKIPPED], None)))
    got = call(x, jnp.asarray(make_diffusers.TIMES), text)
    assert distance(channels_second(got), fixture("guiders")["wan_t2v.skipped"]) <= 2e-5
