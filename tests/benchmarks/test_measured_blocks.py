"""Measured blocks of a streamed video, at a size whose work can be counted by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import pytest
from maxattn_examples.wan.settings import Sizes
from model_steps import workloads
from model_steps.absent_tpu import AbsentTpu
from model_steps.blocks import Blocks, passes
from model_steps.steps import Step

import maxattn as ma
from maxattn.errors import ConfigError, InputError
from tests.examples.wan.streamed import SMALL
from tests.waiting import but

CONFIG = ma.AttentionConfig(attention="dot_product", cross_attention="dot_product")
TOKENS, TEXT, WIDTH, LAYERS = 2, 3, 24, 2
ROW = {"window": 6, "sink": 0, "size": 3, "first": False}


def blocks(scan: bool = True, steps: int = 2, clean_pass: bool = True, **how: Any) -> Blocks:
    work = workloads.wan(CONFIG, 1, 16, 32, 21, Sizes(**SMALL), TEXT, scan)
    return Blocks.of(work, how=passes(steps, clean_pass), **ROW | how)


KINDS = {
    "rolling": {"scan": False},
    "sink": {"window": 9, "sink": 4},
    "first": {"first": True, "clean_pass": False},
}
SEEN = {"rolling": 6, "sink": 9, "first": 3}  # latent frames


@pytest.mark.slow
@pytest.mark.parametrize("kind", but(KINDS, ["rolling"]))
def test_blocks_of_one_kind_are_one_program(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    block = blocks(**KINDS[kind])
    step = block.compiled(jnp.float32)
    cache, told = step.start()
    stage, frame = cache.stage, int(cache.frame)
    with jax.log_compiles():
        for _ in range(3):
            before, cache = cache, step.run(cache, told)
            assert all(x.is_deleted() for x in jax.tree.leaves(before.k)), "it is changed in place"
            assert cache.stage == stage == ("empty" if block.first else "full")
    assert not [line for line in caplog.messages if "compilation of jit(_make_block)" in line]
    assert int(cache.frame) == frame + (0 if kind == "first" else 9)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(cache))
    check_sizes(block, step, SEEN[kind])


def check_sizes(block: Blocks, step: Step, seen: int) -> None:
    """Compare counted operations and bytes with the sizes of the model."""
    runs, own, facts = 2 + block.how.clean_pass, 3 * TOKENS, step.facts(step, 500.0)
    count = step.operations()
    assert count.attention == runs * LAYERS * 4 * own * (seen * TOKENS + TEXT) * WIDTH
    slots = 6 if block.first else seen
    assert facts["cache_bytes"] == 2 * LAYERS * slots * TOKENS * WIDTH * 4
    frames = 9 if block.first else 12
    assert (facts["video_frames"], facts["video_frames_per_s"]) == (frames, 2.0 * frames)
    assert block.work.tokens == own and facts["cache_frames"] == slots


@pytest.mark.parametrize(
    ("how", "error", "setting"),
    [
        ({"window": 7}, ConfigError, "--window 7"),
        ({"window": 2}, ConfigError, "--window 2"),
        ({"window": 0}, InputError, "Stream.window"),
        ({"window": None, "sink": 3}, InputError, "Stream.sink"),
        ({"sink": 4}, InputError, "Stream.sink"),
        ({"size": 0}, InputError, "Stream.frames_per_block"),
        ({"window": None, "size": 4}, InputError, "--frames"),
        ({"steps": 0}, InputError, "denoising_steps"),
    ],
)
def test_invalid_streams_are_refused_by_name(how: Any, error: type, setting: str) -> None:
    with pytest.raises(error) as refused:
        blocks(**how)
    assert setting in str(refused.value).replace(":", "").replace("=", " ")


def test_only_text_to_video_streams() -> None:
    words = ["wan", "stream", "--size", "wan-2.2-i2v-a14b"]
    with pytest.raises(ConfigError, match="stream"):
        measure.main(measure.parser().parse_args(words))


def test_the_command_reports_a_block(monkeypatch, capsys, tmp_path: Path) -> None:
    sizes = Sizes(**SMALL | {"num_layers": 1})
    work = workloads.wan(CONFIG, 1, 16, 32, 21, sizes, TEXT)
    monkeypatch.setattr(workloads, "wan", lambda *a, **how: work)
    written = tmp_path / "f.json"
    words = ["wan", "stream", "--window", "all", "--denoising-steps", "1", "--no-clean-pass"]
    words += ["--rounds", "1", "--steps", "1", "--json", str(written)]
    measure.main(measure.parser().parse_args([*words, "--profile", str(tmp_path / "profile")]))
    out, facts = capsys.readouterr().out, json.loads(written.read_text())
    assert "9 frames" not in out and "12 frames of video" in out and "GiB" in out
    assert facts["window"] is None and facts["attention_tflops"] > 0
    assert facts["tokens_per_s"] == pytest.approx(1e3 * 3 * TOKENS / facts["ms"])


# ---- for a TPU that is not here ------------------------------------------------------------------


WORDS = ["wan", "stream", "--window", "6", "--denoising-steps", "2"]


def here() -> AbsentTpu:
    """Replace the absent TPU by this CPU."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return AbsentTpu(ma.Target.named("cpu"), place)


@pytest.mark.slow
def test_the_lowered_program_is_the_one_that_runs() -> None:
    ours, runs = blocks().lowered(jnp.float32, here().put).compile(), blocks().compiled(jnp.float32)
    assert ours.cost_analysis() == runs.compiled.cost_analysis()
    assert measure.compiler_bytes(ours) == measure.compiler_bytes(runs.compiled) > 0


@pytest.mark.slow
def test_the_command_prints_the_memory_of_a_block(monkeypatch, capsys, tmp_path: Path) -> None:
    work = workloads.wan(CONFIG, 1, 16, 32, 21, Sizes(**SMALL), TEXT, False)
    monkeypatch.setattr(workloads, "wan", lambda *a, **how: work)
    monkeypatch.setattr(AbsentTpu, "named", lambda name: here())
    written = tmp_path / "program.txt"
    words = [*WORDS, "--target", "v6e", "--hlo", str(written)]
    measure.main(measure.parser().parse_args(words))
    assert "s for a cpu, needs 0.0 GiB" in capsys.readouterr().out
    assert "HloModule" in written.read_text()


def test_a_failed_compile_is_refused_with_its_first_line() -> None:
    class Refused:
        def compile(self) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20G of 15.75G hbm\nallocations")

    with pytest.raises(ConfigError, match=r"failed: RESOURCE_EXHAUSTED: 20G of 15\.75G"):
        here().compiled(Refused())


REFUSED_TARGETS = {
    "denoise": (["wan", "denoise", "--target", "v6e"], "write wan stream --target v6e"),
    "option": ([*WORDS, "--target", "v6e", "--option", "a=1"], "without --option"),
    "a GPU": ([*WORDS, "--target", "H200"], "compiles for TPUs"),
    "no name": ([*WORDS, "--target", "v99"], "it must be one of cpu, TPU v4"),
    "no libtpu": ([*WORDS, "--target", "v6e"], r"pip install \"maxattn\[tpu\]\""),
}


@pytest.mark.parametrize("what", REFUSED_TARGETS)
def test_targets_are_refused(what: str, monkeypatch) -> None:
    words, said = REFUSED_TARGETS[what]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=said):
        measure.main(measure.parser().parse_args(words))
