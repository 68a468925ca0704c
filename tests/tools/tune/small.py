"""A call small enough to tune here, its config, and what the cache holds of it."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split

import maxattn as ma
from maxattn.tools.model_shapes import changed, read

BLOCKWISE = split(
    "attention=dot_product use_memory_efficient_attention=true --shape 1,300,300,2,8 --dtype f32"
)
CONFIG = ma.AttentionConfig(attention="dot_product", use_memory_efficient_attention=True)


def measurements(path: Path) -> list[dict]:
    return json.loads(path.read_text())["measurements"]


def call() -> ma.Call:
    return changed(read("1,300,300,2,8"), None, "f32", None, None).call()


def plan_here() -> ma.Plan:
    return ma.plan(call(), CONFIG)
