"""Command lines of drawn and mutated words: the status is 0, 1 or 2, without a traceback."""

from __future__ import annotations

import re
from random import Random

from tests.fuzz.case import Case, Machine, Names, Wrong
from tests.fuzz.configs import draw_yaml
from tests.fuzz.odd import mutated_text

NUMBERS = (
    "0", "-1", "1", "3", "300,512", "nan", "inf", "1e9", "9" * 30, "9" * 5000, "", "abc", "٣",
    "0x10", "1.5", "1_000", " 7",
)  # fmt: skip
OPTIONS = {
    "--shape": (
        "wan-14b-720p", "wan-14b-cross", "sdxl", "1,4096,4096,8,64", "2,77,77,12,128,4",
        "1,10000000,10000000,40,128",
    ),
    "--target": (
        "TPU v5p", "NVIDIA H200", "NVIDIA B200", "RTX 5090", "AMD Instinct MI300X", "cpu", "gpu",
        "TPU v9",
    ),
    "--with": ("tokamax=0.0.17", "fa4-jax", "transformer-engine-jax=2.20.2", "numpy", "tokamax=="),
    "--mesh": (
        "context=4", "context=2,fsdp=2", "tensor=3", "context=0", "context=4,context=4", "x=2",
        "data=-1",
    ),
    "--devices": ("8", "7"),
    "--mask": (
        "causal", "full", "window:5,3", "block-window:1560,7", "block-causal:16",
        "rectangle:0,64,0,4096,64,77,64,77", "video:21,1560,3,7,1", "causal+window:9,0",
    ),
    "--dtype": ("bf16", "f16", "f32", "float32", "int8"),
    "--role": ("self", "cross", "other"),
    "--batch": ("1", "2", "16"),
    "--stream": (
        "wan-1.3b-480p,frames=3,window=7",
        "wan-14b-480p,frames=3,window=4,sink=3,context=tokens",
        "wan-5b-720p,frames=5,first_frame_alone,length=31",
        "tokens=16,heads=4,head_dim=64,layers=2,window=all,length=3",
        "wan-1.3b-720p,sink=1",
        "frames=3",
    ),
    "--lengths": ("300", "300,512", "0", "1,2,3"),
}  # fmt: skip
FLAGS = ("--all", "--inference", "--maxdiffusion", "--why", "--nothing", "--help")
OVERRIDES = (
    "attention=ring", "attention=flash", "ici_context_parallelism=4",
    "flash_block_sizes.block_q=512", "attention=", "=", "attention", "query_chunk_size=-1",
    "mesh_axes=[data]", "deterministic=yes", "flash_block_sizes={block_q: 100}", "attention=[",
    "model.heads=true", "context_parallel=ulysses_ring",
)  # fmt: skip
CONFIGS = ("FOLDER/a.yml", "FOLDER/a.yml", "FOLDER/none.yml", "FOLDER", "", *OVERRIDES[:2])
SOURCE = """\
import contextlib, gc, io, pathlib, tempfile
from maxattn.tools.cli import main
folder = pathlib.Path(tempfile.mkdtemp())
(folder / 'a.yml').write_bytes({yaml!r})
words = [w.replace('FOLDER', str(folder)) for w in {words!r}]
gc.collect()  # a task of an earlier case that failed says so when it goes
said, complained = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
    status = main(words)
"""
# What no valid plan prints: sizes below 1, and sizes that are no number.
ABSURD = re.compile(r"\b[BTSNKH]=(-\d+|0\b|True|nan)\S*|-\d\S* [KMGT]?i?B\b|\bnan\b")


def draw(rng: Random, machine: Machine) -> Case:
    """Draw the words, in any order, of a command that runs nothing on a device."""
    command = rng.choice(["check", "check", "check", "explain", "explain", "convert"])
    config = rng.choice(CONFIGS)
    parts = [[rng.choice(OVERRIDES)] for _ in range(rng.choice([0, 0, 1, 2]))]
    if command != "convert":
        names = rng.sample(list(OPTIONS), rng.choice([0, 1, 2, 3]))
        parts += [[name, rng.choice([*OPTIONS[name]] * 5 + [*NUMBERS])] for name in names]
        parts += [[rng.choice(FLAGS[:4] * 3 + FLAGS)] for _ in range(rng.choice([0, 0, 1]))]
    rng.shuffle(parts)
    words = [command, *([config] if config else []), *(word for part in parts for word in part)]
    words = [mutated_text(rng, w) if i and rng.random() < 0.03 else w for i, w in enumerate(words)]
    yaml = draw_yaml(rng, rng.choice([0, 0, 1, 2]), model=True).encode("utf-8", "replace")
    return Case(SOURCE.format(yaml=yaml, words=words), _check, seconds=10)


def _check(names: Names) -> None:
    out, err = names["said"].getvalue(), names["complained"].getvalue()
    show = "print(status, said.getvalue(), complained.getvalue())"
    if names["status"] not in (0, 1, 2):
        raise Wrong(f"exit status {names['status']!r}", show)
    if "Traceback" in out + err:
        raise Wrong(f"a traceback is printed: {(out + err)[-2000:]}", show)
    if names["status"] == 0 and (absurd := ABSURD.search(out)):
        raise Wrong(f"a status of 0, and it prints {absurd.group()}", show)
