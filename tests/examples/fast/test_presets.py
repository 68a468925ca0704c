"""Presets are settings in a file, for any number of steps, which a user's own keys replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generate
import pytest
from maxattn_examples.fast.cache_settings import CacheSettings, EasyCacheSettings, ShapeSettings
from maxattn_examples.fast.presets import presets
from maxattn_examples.fast.schedules import letters_of
from maxattn_examples.fast.settings import FastSettings, GuidanceSettings
from maxattn_examples.fast.steps import forwards, plan_steps
from maxattn_examples.flux.settings import SamplingSettings as FluxSampling
from maxattn_examples.sdxl.settings import SamplingSettings as SDXLSampling
from maxattn_examples.wan.settings import SamplingSettings as WanSampling
from maxattn_examples.wan.sizes import SIZES

import maxattn as ma
from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT
from tests.examples.sample.pipelines import prepared, run
from tests.golden_text import check_golden

FAMILIES: dict[str, Any] = {"wan": WanSampling, "flux": FluxSampling, "sdxl": SDXLSampling}
NAMES = "gentle", "balanced", "fast"


def shares(family: str, steps: int, guided: bool = True) -> list[float]:
    """Return the share of the forwards that each preset computes."""
    found: list[float] = []
    for name in NAMES:
        fast = FAMILIES[family](fast=FastSettings(preset=name)).fast
        planned = plan_steps(fast, (steps,), guided, 1)
        computed, whole = forwards(planned, 1, guided)
        found.append(computed / whole)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [8, 20, 28, 50])
def test_a_preset_is_a_plan_of_any_number_of_steps(family: str, steps: int) -> None:
    assert tuple(presets()[family]) == NAMES
    for guided in (True, False):
        gentle, balanced, fast = shares(family, steps, guided)
        assert 0.15 <= fast <= balanced < gentle < 0.9
        if (family, steps) == ("wan", 50):
            assert (gentle, balanced, fast) == (0.62, 0.48, 0.36)


def test_own_keys_replace_those_of_a_preset() -> None:
    def settled(**fast: Any) -> FastSettings:
        found = WanSampling(fast=FastSettings(preset="balanced", **fast)).fast
        assert found is not None and found.preset == "balanced"
        return found

    usual = settled()
    assert usual.cache == CacheSettings(shape=ShapeSettings(first=0.2, then="..X", last=0.04))
    assert usual.guidance is None
    gate = GuidanceSettings(stop=0.8, after="gate")
    own = settled(cache=CacheSettings(order=1), guidance=gate)
    assert own.cache == CacheSettings(shape=usual.cache and usual.cache.shape, order=1)
    assert own.guidance == gate
    assert settled(cache=CacheSettings(interval=3)).cache == CacheSettings(interval=3)
    assert settled(cache=None).cache is None
    less = settled(cache=CacheSettings(shape=ShapeSettings(first=0.5)))
    assert less.cache == CacheSettings(shape=ShapeSettings(first=0.5, then="..X", last=0.04))
    easy = CacheSettings(easycache=EasyCacheSettings())
    own_kind = WanSampling(fast=FastSettings(preset="gentle", cache=easy)).fast
    assert own_kind is not None and own_kind.cache == easy, "order is of the preset's own kind"
    sampling = WanSampling(fast=FastSettings(preset="gentle"))
    assert sampling.replace(seed=1).replace(seed=0) == sampling


def test_a_preset_of_few_steps_is_refused() -> None:
    fast = WanSampling(fast=FastSettings(preset="fast")).fast
    with pytest.raises(ConfigError, match=r"fast.preset: fast\n.*in fewer than 8 steps"):
        plan_steps(fast, (4,), True, 4)


@pytest.mark.parametrize(
    ("shape", "letters"),
    [
        ({"first": 0.3, "then": ".X"}, "XXX.X.X.X."),
        ({"first": 0.0, "then": "..X", "last": 0.11}, "X..X..X.XX"),
        ({"first": 0.5, "then": "....X", "last": 0.6}, "XXXXXXXXXX"),
    ],
)
def test_a_shape_is_a_schedule(shape: Any, letters: str) -> None:
    cache = CacheSettings(shape=ShapeSettings(**shape))
    assert letters_of(cache, (10, 10), 4) == letters * 2


def test_a_run_says_its_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, options = prepared(tmp_path)
    run(folder, "wan", *options, "--steps", "10", "--fast", "gentle")
    printed = capsys.readouterr().out
    fast = printed[printed.index("fast      ") : printed.index("latents   ")]
    check_golden("fast/run", fast)


def test_a_plan_for_another_machine_has_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Golden: Wan 1.3B at 480p on an H200, without its weights."""
    sizes = vars(SIZES["wan-2.1-t2v-1.3b"]) | {"_class_name": "WanTransformer3DModel"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    words = [str(ROOT / "configs/wan_1_3b.yml"), "--model", str(tmp_path), "--plan"]
    words += ["--fast", "balanced", "fast.kernels=[{steps: [0, 10], attention: cudnn}]"]
    with ma.Target.named("H200", packages={"fa4-jax": "0.1.0"}).assumed():
        generate.main(words)
    printed = capsys.readouterr().out
    check_golden("fast/plan", printed[printed.index("guidance  ") :])
