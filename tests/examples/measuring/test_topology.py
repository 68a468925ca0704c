"""A block of a streamed video compiled for a TPU that is not here: the program, and refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import measure
import pytest
from measuring import workloads
from measuring.topology import Absent
from wan.sizes import Sizes

import maxattn as ma
from maxattn.errors import ConfigError
from tests.examples.measuring.test_blocks import CONFIG, TEXT, blocks
from tests.examples.wan.streamed import SMALL

WORDS = ["wan", "stream", "--window", "6", "--denoising-steps", "2"]


def here() -> Absent:
    """Let this CPU stand for what is not here."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return Absent(ma.Target.named("cpu"), place)


def test_it_is_the_program_that_streams() -> None:
    ours, runs = blocks().lowered(jnp.float32, here().put).compile(), blocks().compiled(jnp.float32)
    assert ours.cost_analysis() == runs.compiled.cost_analysis()
    assert measure.compiler_bytes(ours) == measure.compiler_bytes(runs.compiled) > 0


@pytest.mark.slow
def test_the_command_says_the_memory(monkeypatch, capsys, tmp_path: Path) -> None:
    work = workloads.wan(CONFIG, 1, 16, 32, 21, Sizes(**SMALL), TEXT, False)
    monkeypatch.setattr(workloads, "wan", lambda *a, **how: work)
    monkeypatch.setattr(Absent, "named", lambda name: here())
    written = tmp_path / "program.txt"
    words = [*WORDS, "--target", "v6e", "--hlo", str(written)]
    measure.main(measure.parser().parse_args(words))
    assert "s for a cpu, needs 0.0 GiB" in capsys.readouterr().out
    assert "HloModule" in written.read_text()


def test_what_does_not_fit_is_said() -> None:
    class Refused:
        def compile(self) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20G of 15.75G hbm\nallocations")

    with pytest.raises(ConfigError, match=r"failed: RESOURCE_EXHAUSTED: 20G of 15\.75G"):
        here().compiled(Refused())


REFUSED = {
    "denoise": (["wan", "denoise", "--target", "v6e"], "write wan stream --target v6e"),
    "option": ([*WORDS, "--target", "v6e", "--option", "a=1"], "without --option"),
    "a GPU": ([*WORDS, "--target", "H200"], "compiles for TPUs"),
    "no name": ([*WORDS, "--target", "v99"], "it must be one of cpu, TPU v4"),
    "no libtpu": ([*WORDS, "--target", "v6e"], r"pip install \"maxattn\[tpu\]\""),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str, monkeypatch) -> None:
    words, said = REFUSED[what]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=said):
        measure.main(measure.parser().parse_args(words))
