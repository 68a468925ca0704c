"""Videos are written by a program of their own, without a warning of jax."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples.conftest import ROOT

# Keeps what comes in as the file that the last argument names, and its arguments beside itself.
FFMPEG = """#!/bin/sh
for last; do :; done
cat > "$last"
echo "$@" > "$0.said"
"""
WRITE = """
import os, sys
sys.path.insert(0, "examples")
import jax, numpy as np
jax.numpy.ones(3).block_until_ready()       # jax's threads run
from maxattn_examples.sample import torch_parts
if sys.argv[1] == "own":
    torch_parts.find_spec = lambda name: None
frames = (np.arange(5 * 6 * 8 * 3) % 251).astype(np.uint8).reshape(5, 6, 8, 3)
for folder, os.environ["PATH"] in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    print(torch_parts.video(frames, torch_parts.Path(folder) / "a" / "000", fps=4), "END")
"""
RAW = (np.arange(5 * 6 * 8 * 3) % 251).astype(np.uint8).tobytes()


def write(whose: str, paths: dict[Path, str]) -> list[str]:
    """Write a video in each folder, with its own PATH, and with warnings as errors.

    One process writes all videos, because most of its time goes into imports.
    """
    words = [str(word) for pair in paths.items() for word in pair]
    command = [sys.executable, "-W", "error", "-c", WRITE, whose, *words]
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert not run.stderr and not run.returncode, run.stderr
    return [said.strip() for said in run.stdout.split("END")[:-1]]


def program(folder: Path, text: str) -> Path:
    """Write an executable with the name ffmpeg."""
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin" / "ffmpeg"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_machines_ffmpeg_gets_every_frame_or_the_frames_are_pictures(tmp_path: Path) -> None:
    takes, lacks, fails = (tmp_path / name for name in ("takes", "lacks", "fails"))
    fine = program(takes, FFMPEG)
    failing = program(fails, "#!/bin/sh\ncat > /dev/null\necho no such codec >&2\nexit 3\n")
    usual = "/usr/bin:/bin"
    paths = {takes: f"{fine.parent}:{usual}", lacks: str(lacks), fails: f"{failing.parent}:{usual}"}
    taken, lacking, failed = write("own", paths)
    file = takes / "a" / "000.mp4"
    assert taken == str(file) and file.read_bytes() == RAW
    assert " -s 8x6 -r 4 " in fine.with_suffix(".said").read_text()
    assert "pip install imageio-ffmpeg" in lacking
    assert f"frames as pictures: {failing} ends with 3: no such codec" in failed
    assert all(len(list((folder / "a" / "000").iterdir())) == 5 for folder in (lacks, fails))


def test_imageio_ffmpegs_program_writes_a_video(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    (file,) = write("theirs", {tmp_path: "/usr/bin:/bin"})
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    run = subprocess.run([ffmpeg, "-loglevel", "error", "-i", file, *raw], capture_output=True)
    assert len(run.stdout) == len(RAW), run.stderr.decode()
