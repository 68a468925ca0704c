"""Our modules with diffusers' weights give diffusers' numbers: outputs and every gradient.

From committed fixtures everywhere; against diffusers itself where torch and diffusers are
installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxattn as ma
from tests.closeness import hold
from tests.fixtures import make_diffusers as made
from tests.fixtures import make_families
from tests.weights.families import FAMILIES, Attention, drawn, theirs
from tests.weights.families.case import Numbers

FOLDER = Path(made.__file__).parent


def live(case: str) -> dict[str, np.ndarray]:
    """Run a case in diffusers, here and now."""
    _need_diffusers()
    return {key: value.numpy() for key, value in made.run(case).items()}


def _need_diffusers() -> None:
    for package in ("torch", "diffusers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def compare(
    name: str,
    module: nnx.Module,
    call: Callable[[Any, dict[str, Any]], Any],
    given: Mapping[str, Any],
    want: Numbers,
    least: float,
) -> None:
    """Compare outputs, in a row, with `out`, and gradients of out * `dout` with `grad.*`.

    Each to a part of its scale: 2e-5 of the output's, 1e-4 of each gradient's.
    """
    graph, state = nnx.split(module)

    def loss(state: Any, given: dict[str, jax.Array]) -> Any:
        results = jax.tree.leaves(call(nnx.merge(graph, state), given))
        out = jnp.concatenate([each.reshape(-1) for each in results])
        return out @ want["dout"].reshape(-1), out

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, out), (by_weights, by_inputs) = both(state, dict(given))
    hold(f"{name}, output", {"": out}, {"": want["out"].reshape(-1)}, 2e-5)
    nnx.update(module, by_weights)  # so that gradients come out under diffusers' names, too
    got = ma.weights.to_diffusers(module) | {f"in.{k}": np.asarray(v) for k, v in by_inputs.items()}
    grads = {key.removeprefix("grad."): v for key, v in want.items() if key.startswith("grad.")}
    got = {key: x for key, x in got.items() if key in grads or not key.startswith("in.")}
    hold(f"{name}, gradients", got, grads, 1e-4, least)


# ---- the modules of Wan and SDXL -----------------------------------------------------------------

CASES = ("wan_self", "wan_cross", "wan_i2v", "sdxl_self", "sdxl_cross")
DENSE = ma.AttentionConfig(attention="dot_product", cross_attention="dot_product")
BLOCKWISE = ma.AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=8, key_chunk_size=8
)


def ours(case: str, config: ma.AttentionConfig) -> nnx.Module:
    """Build the module that a case's weights are for."""
    how: dict[str, Any] = {"heads": made.HEADS, "dim_head": made.DIM_HEAD, "config": config}
    how["rngs"] = nnx.Rngs(0)
    if case.startswith("wan"):
        how |= {"qk_norm": "rms_norm_across_heads", "bias": True, "eps": 1e-6}
    if case.endswith("self"):
        return ma.FlaxAttention(made.WIDTH, **how)
    text = made.TEXT if case == "sdxl_cross" else made.WIDTH
    image = made.WIDTH if case == "wan_i2v" else None
    return ma.CrossAttention(made.WIDTH, text, added_kv_proj_dim=image, **how)


def call(case: str, module: Any, given: dict[str, Any]) -> jax.Array:
    if case == "wan_self":
        table = ma.rope_3d(made.DIM_HEAD, made.FRAMES, made.HEIGHT, made.ROWS)
        return module(given["x"], rotary_emb=table)
    if case == "sdxl_self":
        return module(given["x"])
    return module(given["x"], given["text"], encoder_hidden_states_image=given.get("image"))


def compare_case(case: str, config: ma.AttentionConfig, want: Numbers) -> None:
    module = ours(case, config)
    state = {k.removeprefix("weights."): v for k, v in want.items() if k.startswith("weights.")}
    assert ma.weights.load_diffusers(module, state) == ma.weights.Loaded()
    given = {k.removeprefix("in."): jnp.asarray(v) for k, v in want.items() if k.startswith("in.")}
    compare(case, module, lambda m, i: call(case, m, i), given, want, 1e-3)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_diffusers(case: str) -> None:
    config = BLOCKWISE if case.startswith("wan") else DENSE  # families compare Wan's dense ones
    compare_case(case, config, load_file(FOLDER / f"diffusers_{case}.safetensors"))


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_diffusers_live(case: str) -> None:
    compare_case(case, DENSE, live(case))


# ---- the attentions of all models ----------------------------------------------------------------


def compare_family(name: str, case: Attention, want: Numbers) -> None:
    shapes = {key.removeprefix("grad."): v.shape for key, v in want.items() if "grad." in key}
    module = case.ours(nnx.Rngs(0))
    state = drawn({k: shape for k, shape in shapes.items() if not k.startswith("in.")}, 0)
    assert ma.weights.load_diffusers(module, state) == ma.weights.Loaded()
    want |= {"dout": drawn({"dout": (1, 1, *want["out"].shape)}, 2)["dout"]}
    # The bias of keys moves all scores of a query alike: its gradient is 0 but for rounding.
    least = max(float(np.abs(v).max()) for key, v in want.items() if "grad." in key) / 100
    compare(name, module, case.call, drawn(case.inputs, 1), want, least)


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_of_a_family_are_diffusers(name: str) -> None:
    want = load_file(make_families.FOLDER / f"{name}.safetensors")
    compare_family(name, FAMILIES[name], want)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_of_a_family_are_diffusers_live(name: str) -> None:
    _need_diffusers()
    compare_family(name, FAMILIES[name], theirs(FAMILIES[name]))


def test_every_fixture_is_of_a_family() -> None:
    assert {path.stem for path in Path(make_families.FOLDER).iterdir()} == set(FAMILIES)
