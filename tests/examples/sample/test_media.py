"""Videos are written by a program of their own, which jax does not warn of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples.conftest import ROOT

# Keeps what comes in as the file that the last argument names, and its arguments beside it.
FFMPEG = """#!/bin/sh
for last; do :; done
cat > "$last"
echo "$@" > "$last.said"
"""
WRITE = """
import sys
sys.path.insert(0, "examples")
import jax, numpy as np
jax.numpy.ones(3).block_until_ready()       # jax's threads run
from sample import media
if sys.argv[2] == "own":
    media.find_spec = lambda name: None
frames = (np.arange(5 * 6 * 8 * 3) % 251).astype(np.uint8).reshape(5, 6, 8, 3)
print(media.video(frames, media.Path(sys.argv[1]) / "a" / "000", fps=4))
"""
RAW = (np.arange(5 * 6 * 8 * 3) % 251).astype(np.uint8).tobytes()


def write(folder: Path, whose: str, path: str) -> str:
    """Write a video in a process in which a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", WRITE, str(folder), whose]
    environment = {"PATH": path, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert not run.stderr and not run.returncode, run.stderr
    return run.stdout.strip()


def test_the_machines_ffmpeg_gets_every_frame(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "ffmpeg"
    program.parent.mkdir()
    program.write_text(FFMPEG)
    program.chmod(0o755)
    said = write(tmp_path, "own", f"{program.parent}:/usr/bin:/bin")
    file = tmp_path / "a" / "000.mp4"
    assert said == str(file) and file.read_bytes() == RAW
    assert " -s 8x6 -r 4 " in file.with_suffix(".mp4.said").read_text()


def test_without_one_the_frames_are_pictures(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    said = write(tmp_path, "own", str(tmp_path / "nothing"))
    assert "pip install imageio-ffmpeg" in said
    assert len(list((tmp_path / "a" / "000").iterdir())) == 5


def test_where_ffmpeg_fails_the_frames_are_pictures(tmp_path: Path) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho no such codec >&2\nexit 3\n")
    program.chmod(0o755)
    said = write(tmp_path, "own", f"{tmp_path}:/usr/bin:/bin")
    assert f"frames as pictures: {program} ends with 3: no such codec" in said
    assert len(list((tmp_path / "a" / "000").iterdir())) == 5


def test_imageio_ffmpegs_program_writes_a_video(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    file = write(tmp_path, "theirs", "/usr/bin:/bin")
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    run = subprocess.run([ffmpeg, "-loglevel", "error", "-i", file, *raw], capture_output=True)
    assert len(run.stdout) == len(RAW), run.stderr.decode()
