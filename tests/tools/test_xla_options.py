"""Options of XLA's compiler: how they are read, and what is said of those that it refuses."""

from __future__ import annotations

from pathlib import Path
from shlex import split

import pytest
import yaml

from maxattn.errors import ConfigError
from maxattn.tools.xla_options import xla_options


def test_values_of_every_kind_reach_the_compiler() -> None:
    words = split(
        "xla_gpu_enable_triton_gemm=False --xla_gpu_autotune_level=2 "
        "xla_step_marker_location=-1 xla_gpu_autotune_gemm_rtol=1 xla_dump_hlo_as_text=true "
        "xla_gpu_override_gemm_autotuner=a=b"
    )
    assert xla_options(words) == {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_autotune_level": "2",
        "xla_step_marker_location": "-1",
        "xla_gpu_autotune_gemm_rtol": "1",
        "xla_dump_hlo_as_text": True,
        "xla_gpu_override_gemm_autotuner": "a=b",
    }


def test_a_value_that_flags_spell_otherwise() -> None:
    """As XLA_FLAGS has it, and as `jax.jit` does, which is what this machine's compiler is asked
    for.
    """
    name = "xla_gpu_collective_permute_mode"
    for value in ("peer", "COLLECTIVES_PEER_MEMORY"):
        assert xla_options([f"{name}={value}"]) == {name: "COLLECTIVES_PEER_MEMORY"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("xla_none=1", "No such compile option"),
        ("xla_gpu_enable_triton_gemm=0", "switches as true or false"),
        ("xla_gpu_autotune_level=2.5", "not a valid int32"),
        ("=1", "NAME=VALUE"),
        ("xla_gpu_autotune_level", "NAME=VALUE"),
    ],
)
def test_what_the_compiler_refuses(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        xla_options([word], "training.compiler_options")
    assert str(error.value).startswith("training.compiler_options: ")


def test_options_of_our_configs_are_known_to_every_compiler() -> None:
    """Options for GPUs are read on a CPU too, and so do no harm there."""
    found = 0
    for path in (Path(__file__).parents[2] / "configs").glob("*.yml"):
        said = yaml.safe_load(path.read_text())
        for section in ("training", "sampling"):
            found += len(
                xla_options(
                    (said.get(section) or {}).get("compiler_options", ()), f"{path.name}: {section}"
                )
            )
    assert found >= 10
