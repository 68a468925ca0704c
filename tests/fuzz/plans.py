"""Plans for absent machines: refused, or consistent in what they promise."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from random import Random
from typing import Any

import maxattn as ma
from maxattn.errors import MaxattnError, Unsupported
from maxattn.kernels import refusal
from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.masks import Sizes, draw_tree
from tests.fuzz.settings import AXES, NEUTRAL, STRATEGIES, config_text, draw_blocks, draw_some

TARGETS = (
    "NVIDIA H100", "NVIDIA H200", "NVIDIA B200", "NVIDIA A100", "AMD Instinct MI300X",
    "NVIDIA GB200", "NVIDIA B300", "NVIDIA GB300", "RTX 5090", "RTX 5070 Ti", "RTX PRO 6000",
    "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x", "cpu", "gpu", "tpu",
)  # fmt: skip
PACKAGES = (
    ("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2"),
    ("nvidia-cudnn-cu12", "9.13.1"), ("aiter", "in jax"),
)  # fmt: skip
KERNELS = ("flash", "tokamax_flash", "tpu_flash", "cudnn", "cudnn_flash_te", "dot_product")
DTYPES, ROLES = ("bfloat16", "bfloat16", "float32", "float16"), ("self", "self", "self", "cross")
LENGTHS = (1, 77, 512, 1000, 4096, 32_760, 75_600, 131_072, 1_048_576, 2_097_152, 10_000_000)
HEADS = ((1, 1), (4, 4), (12, 12), (16, 2), (24, 24), (40, 40), (40, 8), (36, 36))
HEAD_DIMS = (1, 40, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256, 300)
SETTINGS = NEUTRAL | {
    "ulysses_shards": (1, 2, 4, 8, 3), "ulysses_attention_chunks": (1, 2, 4, 7),
    "ring_direction": ("one_way", "both_ways"), "use_memory_efficient_attention": (True,),
    "query_chunk_size": (1, 128, 5000), "key_chunk_size": (1, 128, 10**9),
    "flash_min_seq_length": (1, 4096, 10**7), "attention_sharding_uniform": (False,),
}  # fmt: skip
BLOCK_SIZES = (128, 256, 512, 1024, 2048, 3024, 100, 10**6)
SOURCE = """\
target = ma.Target.named({target!r}, packages={packages!r})
def call_of(t, s):
    shapes = ({b}, t, {n}, {h}), ({b}, s, {k}, {h})
    q, k = (jax.ShapeDtypeStruct(shape, {dtype!r}) for shape in shapes)
    return ma.Call.of(q, k, mask={mask}, bias={bias}, return_lse={lse}, role={role!r})
call = call_of({t}, {s})
plan = ma.plan(call, config, {mesh!r}, target)
again = ma.plan(call, config, {mesh!r}, target)
text, why, facts = plan.explain(), plan.explain(why=True), plan.to_dict()
"""
Words = Mapping[str, Any]


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a call, a config, a mesh and a target."""
    axes = draw_mesh(rng)
    sizes, settings = draw_sizes(rng, axes or {}), {"attention": rng.choice(("auto", *KERNELS))}
    settings |= {"context_parallel": rng.choice(STRATEGIES)} | draw_some(rng, SETTINGS, 0.12)
    if rng.random() < 0.12:
        settings["flash_block_sizes"] = draw_blocks(rng, BLOCK_SIZES)
    packages = tuple(p for p in PACKAGES if rng.random() < 0.6)
    words = {"target": rng.choice(TARGETS), "packages": packages, "mesh": axes}
    words |= {"mask": draw_mask(rng, sizes), "dtype": rng.choice(DTYPES)}
    words |= {"role": rng.choice(ROLES), "bias": "None"} | sizes._asdict()
    bias = (1, rng.choice([1, sizes.n]), 1, sizes.s)
    if rng.random() < 0.1:
        words["bias"] = f"jax.ShapeDtypeStruct({bias}, 'float32')"
    words["lse"] = rng.random() < 0.2
    return Case(config_text(settings) + SOURCE.format(**words), check_of(words), seconds=10)


def draw_mesh(rng: Random) -> dict[str, int] | None:
    """Draw sizes of axes, up to thousands of devices, sometimes absurd ones."""
    if rng.random() < 0.25:
        return None
    many = [1, 2, 2, 3, 4, 4, 5, 8, 8, 16, 32, 64, 256]
    axes = {axis: rng.choice(many) for axis in AXES if rng.random() < 0.5}
    if rng.random() < 0.02:
        axes["context"] = rng.choice([10**6, 10**9, 10**30])
    return axes


def draw_sizes(rng: Random, axes: Mapping[str, int]) -> Sizes:
    """Draw sizes whose batch mostly divides over the axes."""
    batch = axes.get("data", 1) * axes.get("fsdp", 1) * rng.choice([1, 1, 2])
    (heads, kv), many = rng.choice(HEADS), axes.get("tensor", 1)
    t = rng.choice([*LENGTHS, rng.randint(1, 10_000_000), rng.randint(1, 5000)])
    s = t if rng.random() < 0.7 else rng.choice([77, 512, *LENGTHS])
    head_dim = rng.choice(HEAD_DIMS)
    batch = batch if rng.random() < 0.95 else batch + 1
    return Sizes(batch, t, s, heads * many, kv * many, head_dim)


def draw_mask(rng: Random, sizes: Sizes) -> str:
    """Draw a mask without large arrays."""
    if rng.random() < 0.35:
        return "None"
    text = draw_tree(rng, sizes, 2, data=False).text()
    lengths = f"M.KeyPadding(np.full({sizes.b}, {max(sizes.s - 5, 1)}))"
    return f"{text} & {lengths}" if rng.random() < 0.3 else text


# ---- what every plan must meet, whatever it decides ----------------------------------------------


def check_of(words: Words) -> Check:
    """Return the checks of a plan that was made."""

    def check(names: Names) -> None:
        plan, again, facts = names["plan"], names["again"], _facts(names, words)
        facts["two plans of one call differ"] = plan == again and hash(plan) == hash(again)
        facts["a plan differs from itself"] = plan.diff(again) == ()
        _require(facts)
        json.dumps(names["facts"])
        if not words["mesh"]:
            _check_named(names, words)

    return check


def _require(facts: Mapping[str, bool]) -> None:
    for otherwise, fact in facts.items():
        if not fact:
            raise Wrong(otherwise, "print(plan)")


def _facts(names: Names, words: Words) -> dict[str, bool]:
    """Return for each possible fault of a plan whether the plan is free of it."""
    plan, call, text = names["plan"], names["call"], names["text"]
    padded = plan.padded_call
    local = plan.context.local_call(padded)
    sizes = (local.batch, local.q_len, local.kv_len, local.heads, local.kv_heads)
    # `-3 KiB` is wrong, `offset=-3` is a mask's.
    units = ("B", "KiB", "MiB", "GiB", "ms", "s")
    pairs = itertools.pairwise(text.split())
    negative = [a for a, b in pairs if b.rstrip(",.;") in units and a.startswith("-")]
    facts = {
        "explain returns no text": bool(text),
        "explain has nan": "nan" not in text.lower().split(),
        f"explain has a negative number: {text}": not negative,
        "padding makes a length shorter": plan.q_len >= call.q_len and plan.kv_len >= call.kv_len,
        "padding of queries is a unit or more": plan.q_len - call.q_len < 2 * plan.context.unit(),
        "key heads do not divide query heads": padded.heads % padded.kv_heads == 0,
        f"a local size is no positive int: {sizes}": all(type(n) is int and n > 0 for n in sizes),
        "local key heads do not divide local query heads": local.heads % local.kv_heads == 0,
    }
    for transfer in plan.collectives:
        size = getattr(transfer, "bytes", getattr(transfer, "size", 0))
        facts[f"a transfer of {size} bytes: {transfer}"] = math.isfinite(size) and size >= 0
        facts[f"a transfer over an axis of one: {transfer}"] = all(
            (words["mesh"] or {}).get(a, 1) > 1 for a in getattr(transfer, "axes", ())
        )
    share = plan.strategy.local_call(padded)
    sequence = (plan.q_len, plan.kv_len) if (sharded := share.q_len < plan.q_len) else None
    share = share.derived(bias=padded.bias, sharded=sharded, sequence=sequence)
    reason = refusal(plan.kernel.name, share, names["target"], names["config"].deterministic)
    return facts | {f"the plan runs {plan.kernel.name}, which refuses: {reason}": reason is None}


def _check_named(names: Names, words: Words) -> None:
    """Check, without a mesh, that naming a kernel raises exactly if the kernel refuses the call.

    A kernel that supports a length supports half of it, if no mask or bias depends on lengths.
    """
    call, target = names["call"], names["target"]
    has_half = words["mask"] == words["bias"] == "None" and min(words["t"], words["s"]) >= 512
    key = "attention" if call.role == "self" else "cross_attention"
    for kernel in KERNELS:
        config = ma.AttentionConfig(**{key: kernel})
        reason, refused = refusal(kernel, call, target), _is_refused(call, config, target)
        differ = f"{kernel}: supports says {reason}, a plan is refused: {refused}"
        _require({differ: (reason is not None) == refused})
        if has_half and not refused:
            half = names["call_of"](words["t"] // 256 * 128, words["s"] // 256 * 128)
            takes_half = not _is_refused(half, config, target)
            _require({f"{config.changed}: takes T, refuses T / 2": takes_half})


def _is_refused(call: Any, config: Any, target: Any) -> bool:
    try:
        ma.plan(call, config, None, target)
    except Unsupported:
        return True
    except MaxattnError as error:
        raise Wrong(f"a kernel that is named is refused by another error: {error!r}") from error
    return False
