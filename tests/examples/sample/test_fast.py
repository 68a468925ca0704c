"""Runs with fewer forwards: settings, presets, curves, and whole runs against diffusers' hooks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from maxattn_examples.flux.settings import SamplingSettings as FluxSampling
from maxattn_examples.sample.loop import Walk
from maxattn_examples.sample.resolve import checkpoint_hash
from maxattn_examples.sample.settings import FastSettings, with_curve
from maxattn_examples.samplers import flow_euler, sample
from maxattn_examples.sdxl.settings import SamplingSettings as SDXLSampling
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import SIZES, Sizes
from maxattn_examples.wan.settings import SamplingSettings as WanSampling
from safetensors.numpy import load_file, save_file

import maxattn as ma
from maxattn import weights
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.steps import StepSettings, resolve
from tests.closeness import distance
from tests.examples.conftest import ROOT
from tests.examples.parity import channels_last, channels_second, fixture, part
from tests.examples.sample.pipelines import FIXTURES, check, pipeline, prepared, run, told
from tests.fixtures import make_caches, make_diffusers
from tests.fixtures import make_guiders as made
from tests.golden_text import check_golden
from tests.packages import skip_without
from tests.waiting import but

FAMILIES: dict[str, Any] = {"wan": WanSampling, "flux": FluxSampling, "sdxl": SDXLSampling}

# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [8, 50])
def test_presets_compute_fewer_forwards_in_any_number_of_steps(family: str, steps: int) -> None:
    shares = []
    for name in ("gentle", "balanced", "fast"):
        fast = FAMILIES[family](fast=FastSettings(preset=name)).fast
        found = resolve(fast, steps, 1, True)
        shares.append(found.forwards / found.whole)
    assert 0.15 <= shares[2] <= shares[1] < shares[0] < 0.9
    assert (family, steps) != ("wan", 50) or shares == [0.62, 0.48, 0.36]


def test_own_keys_replace_those_of_a_preset() -> None:
    def cache(**own: Any) -> Any:
        found = WanSampling(fast=FastSettings(preset="balanced", **own)).fast
        assert found is not None and found.preset == "balanced"
        return found.cache

    usual = {"first": 0.2, "then": "..X", "last": 0.04}
    assert cache().shape.resolved() == usual
    assert cache(cache={"order": 1}).order == 1
    assert cache(cache={"shape": {"first": 0.5}}).shape.resolved() == usual | {"first": 0.5}
    assert cache(cache={"interval": 3}).shape is None and cache(cache=None) is None


def test_a_curve_is_taken_by_the_run_that_it_is_of(tmp_path: Path) -> None:
    file = tmp_path / "curve.yml"
    said = {"ratios": [1.0, 0.9, 0.8], "sampler": "unipc", "shift": 3.0, "checkpoint": "ab",
            "sizes": {"num_layers": 4}}  # fmt: skip
    file.write_text(yaml.safe_dump(said))
    fast = FastSettings(cache={"magcache": {"ratios": str(file)}})  # type: ignore[arg-type]
    facts = {"sampler": "unipc", "shift": 3.0, "checkpoint": "ab", "num_layers": 4, "lora": []}
    taken = with_curve(fast, lambda: facts)
    assert taken is not None and taken.cache is not None and taken.cache.magcache is not None
    assert taken.cache.magcache.ratios == (1.0, 0.9, 0.8)
    others = {"sampler": "euler", "shift": 5.0, "checkpoint": "cd", "num_layers": 5,
              "lora": ["x"], "checkpoint_2": "ef"}  # fmt: skip
    for key, value in others.items():
        with pytest.raises(ConfigErrors, match=f"{key} .*\n.*measured with this {key}"):
            with_curve(fast, lambda: facts | {key: value})  # noqa: B023
    file.write_text("ratios: none")
    with pytest.raises(ConfigError, match="with the key ratios"):
        with_curve(fast, lambda: facts)


def test_a_second_transformer_has_settings_of_its_own(tmp_path: Path, capsys) -> None:
    folder, options = prepared(tmp_path, "wan_a14b")
    words = (*options, "num_inference_steps=9", "fast.cache.interval=3", "fast_2.preset=gentle")
    run(folder, "wan_a14b", *words)
    printed = capsys.readouterr().out
    (schedule,) = re.findall(r"schedule ([X.]+)\n", printed)
    own = WanSampling(fast_2=FastSettings(preset="gentle")).fast_2
    first = int(re.findall(r"expert +transformer, steps 1 to (\d+)", printed)[0])
    counts = first, 9 - first
    settings = StepSettings.model_validate({"cache": {"interval": 3}})
    assert schedule == resolve((settings, own), counts, 2, True).letters
    with pytest.raises(ConfigErrors, match=r"fast_2: given\n.*this pipeline has one"):
        run(*prepared(tmp_path / "one")[:1], "wan", *told(tmp_path, "wan")[1], "fast_2.preset=fast")


def test_a_hash_of_weights_is_of_every_tensor(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "m.safetensors"
    tensors = {f"blocks.{i}.w": rng.normal(size=(300, 300)).astype("float32") for i in range(4)}
    tensors |= {f"blocks.{i}.b": rng.normal(size=300).astype("float32") for i in range(4)}
    save_file(tensors, file)
    before = checkpoint_hash(tmp_path)
    assert before == checkpoint_hash(file)
    for name in tensors:
        changed = {**tensors, name: -tensors[name] if name.endswith("b") else 0 * tensors[name]}
        save_file(changed, file)
        assert checkpoint_hash(tmp_path) != before
    assert checkpoint_hash(tmp_path / "none") is None


# ---- beside diffusers ----------------------------------------------------------------------------

RATIOS = ", ".join(map(str, make_caches.RATIOS))
WORDS = {
    "magcache": (
        f"fast.cache.magcache.ratios=[{RATIOS}]",
        f"fast.cache.magcache.threshold={make_caches.MAGCACHE['threshold']}",
        f"fast.cache.magcache.most={make_caches.MAGCACHE['max_skip_steps']}",
    ),
    "first_block": (
        f"fast.cache.first_block.threshold={make_caches.FIRST_BLOCK}",
        "guidance_batched=false",
    ),
}
SAID = {
    "magcache": [f"schedule {make_caches.SCHEDULE}\n"],
    "first_block": [
        "computed 5 of 10 steps of the prediction without: X.X.XX.X..",
        "computed 5 of 10 steps: X.X.XX.X..",
    ],
}


@pytest.mark.parametrize("cache", WORDS)
def test_a_run_is_diffusers(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = load_file(FIXTURES / "diffusers_caches.safetensors")[f"out.{cache}"]
    folder, options = prepared(tmp_path)
    steps = f"num_inference_steps={make_caches.STEPS}"
    found = run(folder, "wan", *options, steps, *WORDS[cache])
    printed = capsys.readouterr().out
    assert all(line in printed for line in SAID[cache]), printed
    check(found, want)


@pytest.mark.parametrize("cache", WORDS)
def test_the_fixture_is_what_diffusers_draws(cache: str) -> None:
    skip_without("torch", "diffusers", "transformers")
    from safetensors.torch import load_file as load_torch

    inputs = load_torch(FIXTURES / "diffusers_run_wan.safetensors")
    want = load_file(FIXTURES / "diffusers_caches.safetensors")[f"out.{cache}"]
    check(make_caches.run(cache, inputs).numpy(), want)


def guided_sample(name: str, noise: Any) -> Any:
    """Sample as diffusers' modular pipelines do, with the fixture's stand-in for a model."""
    case = made.cases()[name]
    settings = StepSettings.model_validate({"guidance": case.settings or None})
    guided = case.options["guidance_scale"] != 1
    steps = resolve(settings, case.steps, len(made.STRENGTHS), guided)

    def predict(x: Any, t: Any, which: str) -> Any:
        what = made.TEXTS[0 if which == "without" else 1]
        layers = [lambda x, i=i: made.layer(x, i, t, what, jnp) for i in range(len(made.STRENGTHS))]
        return ma.blocks(layers, jnp.sin(x))

    schedule = flow_euler(case.steps, made.SHIFT)
    scale = case.options["guidance_scale"] if guided else None
    return sample(predict, jnp.asarray(noise), schedule, steps=steps, scale=scale)


@pytest.mark.parametrize("name", made.cases())
def test_guidance_is_diffusers(name: str) -> None:
    theirs = load_file(Path(made.__file__).parent / "diffusers_guiders.safetensors")
    ours = guided_sample(name, theirs["noise"])
    assert distance(ours, theirs[name][-1]) <= 5e-6


@pytest.mark.parametrize("name", made.cases())
def test_guidance_is_diffusers_live(name: str) -> None:
    skip_without("torch", "diffusers")
    noise = made.first()
    ours = guided_sample(name, noise.numpy())
    assert distance(ours, made.run(made.cases()[name], noise).numpy()[-1]) <= 5e-6


@pytest.mark.parametrize("scan", [True, False])
def test_a_model_that_skips_a_layer_is_diffusers(scan: bool) -> None:
    theirs = fixture("wan_t2v")
    sizes = Sizes(**make_diffusers.MODEL)
    ours = WanTransformer3D(sizes, rngs=nnx.Rngs(0), scan_layers=scan)
    weights.load_diffusers(ours, part(theirs, "weights."))
    x, text = channels_last(theirs["in.x"]), jnp.asarray(theirs["in.text"])
    skip = {"layers": [made.SKIPPED], "start": 0.0, "stop": 1.0}
    settings = StepSettings.model_validate({"guidance": {"skip": skip}})
    step = resolve(settings, 3, sizes.num_layers)[1]
    call = jax.jit(lambda x, t: ma.steps.forward(step, {}, ours, x, t, text, name="third")[0])
    got = call(x, jnp.asarray(make_diffusers.TIMES))
    assert distance(channels_second(got), fixture("guiders")["wan_t2v.skipped"]) <= 2e-5


# ---- whole runs ----------------------------------------------------------------------------------


class Plain(NamedTuple):
    """A pipeline, the options that name its inputs, and its latents if every step is computed."""

    name: str
    folder: Path
    options: list[str]
    latents: np.ndarray


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    name = request.param
    folder, options = prepared(tmp_path_factory.mktemp(name), name)
    return Plain(name, folder, options, run(folder, name, *options))


# tests/examples/compare has a run of Flux.1 that reuses.
@pytest.mark.parametrize("plain", but(FAMILIES, ["wan"]), indirect=True)
def test_a_pipeline_reuses_on_a_mesh(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    """On eight devices; with no step reused it is bit-equal to no setting, and reuse is printed."""
    name, folder, options, latents = plain
    assert np.array_equal(run(folder, name, *options, "fast.cache.schedule=XXXX"), latents)
    capsys.readouterr()
    fewer = run(folder, name, *options, "fast.cache.schedule=XX.X", "fast.guidance.stop=0.75")
    printed = capsys.readouterr().out
    assert "approximate: 5 of 8 forwards are computed, 62%; " in printed
    assert re.search(r" kept between steps\n", printed)
    assert re.search(r" 3 +reused +two +0\n", printed)
    assert "not in one call: steps of sampling.fast differ between the predictions" in printed
    assert 0 < np.abs(fewer - latents).max() < np.abs(latents).max()


@pytest.mark.parametrize("order", but([0, 1], [1]))
def test_no_more_is_kept_than_is_printed(order: int, tmp_path: Path, capsys, monkeypatch) -> None:
    _, options = told(tmp_path, "wan")
    live: list[int] = []

    def residuals() -> dict[int, int]:
        arrays = (x for x in jax.live_arrays() if x.shape[1:] == (18, 24))
        return {id(x): x.nbytes // jax.device_count() for x in arrays}

    def taken(walk: Walk, *args: Any) -> None:
        others = residuals()

        def observed(_: int, state: Any) -> Any:
            live.append(sum(size for x, size in residuals().items() if x not in others))
            return state

        walk.observe = observed
        take(walk, *args)

    take = Walk.take
    monkeypatch.setattr(Walk, "take", taken)
    cache = f"fast.cache={{schedule: XX..X..X.X, order: {order}}}"
    run(pipeline(tmp_path, "wan", "unipc"), "wan", *options, "--steps", "10", cache)
    assert f"; {max(live) / 2**20:.4g} MiB kept between steps" in capsys.readouterr().out


@pytest.mark.parametrize("order", but([0, 1], [1]))
def test_layers_that_are_not_scanned_decide_as_scanned_ones(order: int, tmp_path: Path) -> None:
    """As on a GPU, where each layer's parameters are read inside a branch of the program."""
    folder, options = prepared(tmp_path)
    cache = f"fast.cache={{first_block: {{threshold: 0.3}}, order: {order}}}"
    words = (*options, "num_inference_steps=9", cache)
    scanned, apart = (
        run(folder, "wan", *words, f"model.scan_layers={scan}") for scan in ("true", "false")
    )
    np.testing.assert_allclose(apart, scanned, atol=1e-4 * np.abs(scanned).max())


@pytest.mark.parametrize("plain", ["wan"], indirect=True)
def test_some_steps_have_other_attention(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    """Some steps use tpu_flash, which rounds differently; the others use dot_product."""
    _, folder, options, latents = plain
    words = "fast.attention=[{{steps: [1, 3], overrides: [attention={}]}}]"
    other = run(folder, "wan", *options, words.format("tpu_flash"))
    assert re.search(r"2 to 3 +computed +two +attention=tpu_flash +4\n", capsys.readouterr().out)
    assert not np.array_equal(other, latents)
    check(other, latents)
    with pytest.raises(ma.errors.MaxattnError, match="cudnn"):
        run(folder, "wan", *options, words.format("cudnn"))


def test_each_prediction_has_devices_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, options = prepared(tmp_path)
    one = ("ici_fsdp_parallelism=1", "ici_context_parallelism=8", "guidance_batched=false")
    apart = run(folder, "wan", *options, *one)
    capsys.readouterr()
    two = ("ici_data_parallelism=2", "ici_fsdp_parallelism=1", "ici_context_parallelism=4")
    spread = run(folder, "wan", *options, *two)
    printed = capsys.readouterr().out
    assert "one call of the model for both, each on half of the 2 devices of data" in printed
    assert "1 samples in 2 rows of the model" in printed
    check(spread, apart)


def test_a_plan_for_another_machine_has_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A golden text for Wan 1.3B at 480p on an H200, without its weights."""
    sizes = vars(SIZES["wan-2.1-t2v-1.3b"]) | {"_class_name": "WanTransformer3DModel"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    words = [str(ROOT / "configs/wan_1_3b.yml"), "--model", str(tmp_path), "--plan"]
    attention = "{steps: [0, 10], overrides: [attention=cudnn]}"
    words += ["--fast", "balanced", f"fast.attention=[{attention}]"]
    with ma.Target.named("H200", packages={"fa4-jax": "0.1.0"}).assumed():
        generate.main(words)
    printed = capsys.readouterr().out
    check_golden("fast/plan", printed[printed.index("guidance  ") :])
