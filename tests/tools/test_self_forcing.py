"""Conversion of a YAML of Self-Forcing or LongLive; texts: golden/cli_convert.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from yaml import safe_load

from maxattn.config import AttentionConfig
from maxattn.errors import ConfigError
from maxattn.tools.self_forcing import load_rollout
from tests.golden_text import check_golden, check_refused
from tests.tools.cli.command import run

HERE = Path("tests/tools/self_forcing")
GOOD = sorted(p.stem for p in HERE.glob("*.yml") if not p.stem.startswith("wrong"))
BAD = sorted(p.stem for p in HERE.glob("wrong*.yml"))


@pytest.mark.parametrize("name", GOOD)
def test_what_is_converted(capsys: Any, name: str) -> None:
    ran = run(capsys, "convert", str(HERE / f"{name}.yml"))
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"cli/convert/self_forcing_{name}", ran.out)


@pytest.mark.parametrize("name", GOOD)
def test_no_key_is_dropped_in_silence(name: str) -> None:
    """Each key of the file is imported, or is listed in `left_out`."""
    theirs, made = safe_load((HERE / f"{name}.yml").read_text()), load_rollout(HERE / f"{name}.yml")
    flat = set()
    for key, given in theirs.items():
        flat |= {f"{key}.{k}" for k in given} if isinstance(given, dict) else {key}
    left_out = {p for p in flat if p in made.left_out or p.partition(".")[0] in made.left_out}
    known = (
        "num_frame_per_block", "local_attn_size", "sink_size", "independent_first_frame", "causal",
        "denoising_step_list", "warp_denoising_step", "context_noise", "model_name",
        "use_infinite_attention", "model_kwargs.timestep_shift",
    )  # fmt: skip
    taken = {path for path in flat if path.endswith(known)}
    assert taken | left_out == flat and not taken & left_out


def test_what_is_converted_is_read_as_ours(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "stream.yml").write_text(run(capsys, "convert", str(HERE / "window.yml")).out)
    assert AttentionConfig.from_yaml(tmp_path / "stream.yml") == AttentionConfig()
    assert safe_load((tmp_path / "stream.yml").read_text())["rollout"] == {
        "frames_per_block": 3,
        "window": 4,
        "sink": 3,
        "first_frame_alone": True,
        "denoising_steps": [1000, 750, 500, 250],
        "warp_steps": True,
        "timestep_shift": 5.0,
        "context_noise": 10.0,
        "positions": "absolute",
    }


@pytest.mark.parametrize("name", [*BAD, "checked"])
def test_what_is_refused(capsys: Any, name: str) -> None:
    words = ("convert", f"{HERE}/{name}.yml") if name in BAD else ("check", f"{HERE}/window.yml")
    ran = run(capsys, *words)
    assert (ran.status, ran.out) == (1, "")
    check_golden(f"cli/convert/self_forcing_{name}", ran.err)


def test_overrides_and_our_own_files_are_refused(capsys: Any) -> None:
    ran = run(capsys, "convert", str(HERE / "window.yml"), "window=3")
    check_golden("cli/convert/self_forcing_overrides", ran.text)
    ours = "configs/wan_1_3b_stream.yml"
    check_refused("cli/convert/self_forcing_ours", ConfigError, load_rollout, ours)
