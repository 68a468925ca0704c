"""Plans for machines that are not here: made or refused, and what they promise is consistent."""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

from tests.fuzz.calls import config_text
from tests.fuzz.case import Case, Machine
from tests.fuzz.categories.meshes import STRATEGIES
from tests.fuzz.kernels import BLOCKS
from tests.fuzz.mask_trees import Sizes, draw_tree
from tests.fuzz.plan_checks import check_of

TARGETS = (
    "NVIDIA H100", "NVIDIA H200", "NVIDIA B200", "NVIDIA A100", "AMD Instinct MI300X",
    "NVIDIA GB200", "NVIDIA B300", "NVIDIA GB300", "RTX 5090", "RTX 5070 Ti", "RTX PRO 6000",
    "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x", "cpu", "gpu", "tpu",
)  # fmt: skip
PACKAGES = (
    ("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2"),
    ("nvidia-cudnn-cu12", "9.13.1"), ("aiter", "in jax"),
)  # fmt: skip
KERNELS = (
    "auto", "flash", "tokamax_flash", "tpu_flash", "cudnn", "cudnn_flash_te", "dot_product",
)  # fmt: skip
DTYPES, ROLES = ("bfloat16", "bfloat16", "float32", "float16"), ("self", "self", "self", "cross")
LENGTHS = (1, 77, 512, 1000, 4096, 32_760, 75_600, 131_072, 1_048_576, 2_097_152, 10_000_000)
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


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a call, a config, a mesh and a target."""
    axes = draw_mesh(rng)
    sizes, settings = _sizes(rng, axes), _settings(rng)
    packages = tuple(p for p in PACKAGES if rng.random() < 0.6)
    words = {"target": rng.choice(TARGETS), "packages": packages, "mesh": axes}
    words |= {"mask": _mask(rng, sizes), "dtype": rng.choice(DTYPES), "role": rng.choice(ROLES)}
    words |= dict(bias=_bias(rng, sizes), lse=rng.random() < 0.2, **sizes._asdict())
    source = config_text(settings) + SOURCE.format(**words)
    facts = {"mask": words["mask"], "target": words["target"], "mesh": str(axes)}
    return Case("plans", seed, source, check_of(words), facts=facts | settings, seconds=10)


def draw_mesh(rng: Random) -> dict[str, int] | None:
    """Draw sizes of axes, up to thousands of devices and in few draws absurd ones."""
    if rng.random() < 0.25:
        return None
    many = [1, 2, 2, 3, 4, 4, 5, 8, 8, 16, 32, 64, 256]
    axes = {
        axis: rng.choice(many)
        for axis in ("data", "fsdp", "context", "tensor")
        if rng.random() < 0.5
    }
    if rng.random() < 0.02:
        axes["context"] = rng.choice([10**6, 10**9, 10**30])
    return axes


def _sizes(rng: Random, axes: dict[str, int] | None) -> Sizes:
    axes = axes or {}
    batch = prod(axes.get(a, 1) for a in ("data", "fsdp")) * rng.choice([1, 1, 2])
    heads, kv = rng.choice(
        [(1, 1), (4, 4), (12, 12), (16, 2), (24, 24), (40, 40), (40, 8), (36, 36)]
    )
    many = axes.get("tensor", 1)
    t = rng.choice([*LENGTHS, rng.randint(1, 10_000_000), rng.randint(1, 5000)])
    s = t if rng.random() < 0.7 else rng.choice([77, 512, *LENGTHS])
    head_dim = rng.choice([1, 40, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256, 300])
    return Sizes(
        batch if rng.random() < 0.95 else batch + 1, t, s, heads * many, kv * many, head_dim
    )


def _settings(rng: Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "attention": rng.choice(KERNELS),
        "context_parallel": rng.choice(STRATEGIES),
    }
    more = {
        "ulysses_shards": rng.choice([1, 2, 4, 8, 3]),
        "ulysses_attention_chunks": rng.choice([1, 2, 4, 7]),
        "ring_direction": rng.choice(["one_way", "both_ways"]),
        "deterministic": True,
        "use_memory_efficient_attention": True,
        "query_chunk_size": rng.choice([1, 128, 5000]),
        "key_chunk_size": rng.choice([1, 128, 10**9]),
        "flash_min_seq_length": rng.choice([1, 4096, 10**7]),
        "fallback": rng.choice(["error", "warn", "allow"]),
        "flash_block_sizes": {
            b: rng.choice([128, 256, 512, 1024, 2048, 3024, 100, 10**6])
            for b in BLOCKS
            if rng.random() < 0.4
        },
        "use_base2_exp": True,
        "attention_sharding_uniform": False,
    }
    return settings | {key: value for key, value in more.items() if rng.random() < 0.12}


def _mask(rng: Random, sizes: Sizes) -> str:
    """Draw a mask that needs no large array."""
    if rng.random() < 0.35:
        return "None"
    tree = draw_tree(rng, sizes, 2, data=False)
    if rng.random() < 0.3:
        return f"{tree.text()} & M.KeyPadding(np.full({sizes.b}, {max(sizes.s - 5, 1)}))"
    return tree.text()


def _bias(rng: Random, sizes: Sizes) -> str:
    shape = (1, rng.choice([1, sizes.n]), 1, sizes.s)
    return f"jax.ShapeDtypeStruct({shape}, 'float32')" if rng.random() < 0.1 else "None"
