"""MagCache and the first-block cache are diffusers' hooks, on a whole run of a small Wan."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.examples.sample.pipelines import FIXTURES, check, prepared, run
from tests.fixtures import make_caches as made

RATIOS = ", ".join(map(str, made.RATIOS))
WORDS = {
    "magcache": (
        f"fast.cache.magcache.ratios=[{RATIOS}]",
        f"fast.cache.magcache.threshold={made.MAGCACHE['threshold']}",
        f"fast.cache.magcache.most={made.MAGCACHE['max_skip_steps']}",
    ),
    "first_block": (
        f"fast.cache.first_block.threshold={made.FIRST_BLOCK}",
        "guidance_batched=false",
    ),
}
SAID = {
    "magcache": [f"schedule {made.SCHEDULE} (magcache, threshold 0.06)"],
    "first_block": [
        "computed 5 of 10 steps without the text: X.X.XX.X..",
        "computed 5 of 10 steps with the text: X.X.XX.X..",
    ],
}


@pytest.mark.parametrize("cache", WORDS)
def test_a_run_is_diffusers(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = load_file(FIXTURES / "diffusers_caches.safetensors")[f"out.{cache}"]
    folder, options = prepared(tmp_path)
    steps = f"num_inference_steps={made.STEPS}"
    found = run(folder, "wan", *options, steps, *WORDS[cache])
    printed = capsys.readouterr().out
    assert all(line in printed for line in SAID[cache]), printed
    check(found, want)


@pytest.mark.parametrize("cache", WORDS)
def test_the_fixture_is_what_diffusers_draws(cache: str) -> None:
    for package in ("torch", "diffusers", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from safetensors.torch import load_file as load_torch

    inputs = load_torch(FIXTURES / "diffusers_run_wan.safetensors")
    want = load_file(FIXTURES / "diffusers_caches.safetensors")[f"out.{cache}"]
    check(made.run(cache, inputs).numpy(), want)
