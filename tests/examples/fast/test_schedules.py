"""Schedules that are computed before a run, and curves that are refused for another run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from maxattn_examples.fast.cache_settings import CacheSettings, MagCacheSettings
from maxattn_examples.fast.curves import Facts
from maxattn_examples.fast.run_weights import RunWeights, checkpoint_hash
from maxattn_examples.fast.schedules import letters_of, schedule_lines
from maxattn_examples.fast.settings import FastSettings
from maxattn_examples.fast.steps import plan_steps
from safetensors.numpy import save_file

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT

T2V, I2V = {"num_layers": 30, "num_attention_heads": 12, "in_channels": 16}, 36
LARGE = {"num_layers": 40, "num_attention_heads": 40}
CURVES = {
    "t2v_1_3b": (50, 5.0, T2V),
    "t2v_14b": (50, 5.0, LARGE | {"in_channels": 16}),
    "i2v_480p": (40, 3.0, LARGE | {"in_channels": I2V}),
    "i2v_720p": (40, 5.0, LARGE | {"in_channels": I2V}),
}


def curve(name: str) -> str:
    return str(ROOT / "configs" / "curves" / f"magcache_wan_2_1_{name}.yml")


def magcache(ratios: Any, steps: Any, facts: Facts | None = None, **how: Any) -> str:
    experts = (steps,) if isinstance(steps, int) else steps
    cache = CacheSettings(magcache=MagCacheSettings(ratios=ratios, **how))
    return letters_of(cache, experts, 4, facts)


@pytest.mark.parametrize(
    ("name", "forwards"),
    [
        ("t2v_14b", (56, 50, 42, 36)),
        ("t2v_1_3b", (54, 50, 42, 36)),
        ("i2v_480p", (46, 38, 34, 30)),
        ("i2v_720p", (44, 40, 34, 28)),
    ],
)
def test_published_curves_leave_the_forwards_that_their_code_computes(
    name: str, forwards: tuple[int, ...]
) -> None:
    """Counted by replaying the published code, whose branches are counted apart."""
    steps, shift, sizes = CURVES[name]
    facts = Facts("unipc", shift, sizes)
    settings = ((0.06, 2), (0.12, 2), (0.12, 4), (0.24, 6))
    found = [magcache(curve(name), steps, facts, threshold=t, most=k) for t, k in settings]
    assert tuple(2 * letters.count("X") for letters in found) == forwards
    if name == "t2v_14b":
        assert found[1] == "XXXXXXXXXX..X..X..X..X..X..X..X..X..X..X..X.X.X.XX"


def test_magcache_counts_errors_of_each_prediction() -> None:
    """The second prediction alone reaches the threshold, in the second step that would reuse."""
    ratios = ((1.0, 0.9), *((1.0, 0.9),) * 9)
    assert magcache(ratios, 10, threshold=0.25, most=5, retained=0.1) == "X.X.X.X.X."
    assert magcache(ratios, 10, threshold=0.30, most=5, retained=0.1) == "X..X..X..X"
    assert magcache(ratios, 10, threshold=9.0, most=3, retained=0.25) == "XXX...X..."


def test_each_model_retains_its_own_first_steps() -> None:
    assert magcache((1.0,) * 20, (10, 10), retained=0.3, most=9) == "XXX.......XXX......."
    assert letters_of(CacheSettings(interval=3), (5, 4), 4) == "X..X.X..X"


def test_a_curve_is_taken_at_its_nearest_steps_if_asked() -> None:
    ratios = (1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.4)
    with pytest.raises(ConfigError, match="interpolate=true") as error:
        magcache(ratios, 19)
    assert "a curve of 10 steps, and the run has 19" in str(error.value)
    found = magcache(ratios, 19, threshold=0.4, most=99, retained=0.05, interpolate=True)
    assert found == "X.X...............X", "the 9 gaps of the curve are 18 of the run"


def test_a_threshold_that_reuses_nothing_is_said() -> None:
    cache = CacheSettings(magcache=MagCacheSettings(ratios=(1.0,) * 10, threshold=0))
    letters = letters_of(cache, (10,), 4)
    said = list(schedule_lines(cache, letters))
    assert said == ["all 10 steps are computed: magcache, threshold 0 reuses nothing"]
    cache = CacheSettings(interval=5)
    found = letters_of(cache, (8,), 4)
    assert list(schedule_lines(cache, found)) == ["schedule X....X.. (interval)"]
    said = list(schedule_lines(CacheSettings(schedule="X" * 8), "X" * 8, zeros=2))
    assert said == ["6 of 8 steps are computed, the others zeros: schedule reuses nothing"]


def test_a_schedule_that_was_printed_can_be_written() -> None:
    letters = magcache((1.0,) * 12, 12)
    assert letters_of(CacheSettings(schedule=letters), (12,), 4) == letters


def written(folder: Path, **more: Any) -> str:
    path = folder / "curve.yml"
    path.write_text(yaml.safe_dump({"ratios": [1.0] * 10, **more}))
    return str(path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sampler": "euler"}, "measured with this sampler, and the run has unipc"),
        ({"shift": 3.0}, "measured with this shift of times, and the run has 5"),
        ({"sizes": {"num_layers": 40}, "shift": 3.0}, "this size, and this one has num_layers 30"),
        ({"experts": 2}, "a model of this size, and this one has experts 1"),
        ({"checkpoint": "0" * 16}, "it was measured on these weights, and those of"),
        ({"embedded_guidance": 3.5}, "the model was told this guidance, and in the run None"),
        ({"samler": "unipc"}, "did you mean 'sampler'"),
        ({"ratios": [1.0, 0.0] * 5}, "each is a positive number"),
    ],
)
def test_a_curve_of_another_run_is_refused(tmp_path: Path, more: Any, says: str) -> None:
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    facts = Facts("unipc", 5.0, T2V, RunWeights({"transformer": tmp_path}))
    with pytest.raises((ConfigError, ConfigErrors)) as error:
        magcache(written(tmp_path, **more), 10, facts)
    assert says in str(error.value) and not str(error.value).startswith("config: ")
    right = {"sampler": "unipc", "shift": 5, "sizes": T2V, "checkpoint": checkpoint_hash(tmp_path)}
    assert magcache(written(tmp_path, **right), 10, facts) == "XX..X..X.."


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"checkpoint_2": "0" * 16}, "and those of {}/transformer_2 are"),
        ({"checkpoint_2": None}, "has a transformer_2, and the file has no hash of it"),
        ({"lora": []}, "measured with this LoRA, and the run has transformer: "),
        ({"lora": ["transformer: 1 x 1"]}, "lora transformer: 1 x 1"),
        ({"scale": 50.0}, "x 50"),
        ({"names": None}, ", names "),
    ],
)
def test_a_curve_is_of_every_transformer_and_lora(
    tmp_path: Path, change: dict[str, Any], says: str | None
) -> None:
    parts = {name: tmp_path / name for name in ("transformer", "transformer_2")}
    lora = tmp_path / "lora.safetensors"
    for n, file in enumerate((*(x / "model.safetensors" for x in parts.values()), lora)):
        file.parent.mkdir(exist_ok=True)
        save_file({"x": np.full(3, n, np.float32)}, file)
    weights = RunWeights(parts, {"transformer": lora}, 2.0, names=lora)
    said = {**weights.checkpoints(), "lora": weights.lora_said(), **change}
    run = {"scale": said.pop("scale", 2.0), "names": said.pop("names", lora)}
    facts = Facts(experts=2, weights=weights._replace(**run))
    if says is None:
        assert magcache(written(tmp_path, **said), 10, facts) == "XX..X..X.."
        return
    with pytest.raises(ConfigErrors, match=re.escape(says.format(tmp_path))):
        magcache(written(tmp_path, **said), 10, facts)


def test_a_hash_is_of_the_weights(tmp_path: Path) -> None:
    x, found = np.zeros(10**6, np.float32), set()
    for change in (None, 0, 10**6 - 1):
        if change is not None:
            x[change] += 1
        save_file({"x": x}, tmp_path / "model.safetensors")
        found.add(checkpoint_hash(tmp_path))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("magcache.ratios", [1, math.nan], "; that of step 2 is nan"),
        ("magcache.ratios", [[1, 0.9], [1, math.inf]], "; that of step 2 is [1, inf]"),
        ("magcache.ratios", [], "each is a positive number"),
        ("magcache.ratios", 5, "it is the YAML file of a curve, or a list of its ratios"),
        ("teacache.polynomial", [math.nan, 0], "is a finite number; number 1 is nan"),
        ("teacache.polynomial", [], "a polynomial has a coefficient for each power"),
        ("teacache.polynomial", "wan", "wan-2.1-i2v-720p, or a list of coefficients"),
    ],
)
def test_numbers_that_cannot_be_measured_are_one_problem(key: str, value: Any, says: str) -> None:
    kind, name = key.split(".")
    with pytest.raises(ConfigErrors) as error:
        CacheSettings(**{kind: {name: value}})
    assert [x.setting for x in error.value.problems] == [key]
    assert says in error.value.rule


def test_a_model_of_one_layer_is_told_what_it_has() -> None:
    caches: list[Any] = [{"first_block": {}}, {"magcache": {"calibrated": "curve.yml"}}]
    caches.append({"magcache": {"ratios": "curve.yml"}})
    skips: Any = {"guidance": {"skip": {"layers": [0]}}}
    for fast in (*({"cache": x} for x in caches), skips):
        with pytest.raises(ConfigError, match=r"remove it|set sampling.fast.cache.interval"):
            plan_steps(FastSettings(**fast), (10,), True, 1)
    assert plan_steps(FastSettings(cache=CacheSettings(interval=3)), (10,), True, 1)
