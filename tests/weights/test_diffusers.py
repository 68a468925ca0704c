"""Our attentions with diffusers' weights give diffusers' outputs and gradients.

Compares with committed fixtures, and with diffusers itself if torch and diffusers are installed.
"""

from __future__ import annotations

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
from tests.packages import skip_without
from tests.waiting import but
from tests.weights.families import FAMILIES, Attention, drawn, theirs
from tests.weights.families.case import Numbers

FOLDER = Path(made.__file__).parent


def live(case: str) -> dict[str, np.ndarray]:
    """Run a case in diffusers now."""
    _need_diffusers()
    return {key: value.numpy() for key, value in made.run(case).items()}


def _need_diffusers() -> None:
    skip_without("torch", "diffusers")


def compare_family(name: str, case: Attention, want: Numbers) -> None:
    """Compare concatenated outputs with `out`, and gradients of out * `dout` with `grad.*`.

    Tolerances are 2e-5 of the output's scale, and 1e-4 of each gradient's.
    """
    grads = {key.removeprefix("grad."): v for key, v in want.items() if key.startswith("grad.")}
    module, shapes = case.ours(nnx.Rngs(0)), {key: v.shape for key, v in grads.items()}
    weights = drawn({k: shape for k, shape in shapes.items() if not k.startswith("in.")}, 0)
    assert ma.weights.load_diffusers(module, weights) == ma.weights.Loaded()
    dout = drawn({"dout": (1, 1, *want["out"].shape)}, 2)["dout"].reshape(-1)
    graph, state = nnx.split(module)

    def loss(state: Any, given: dict[str, jax.Array]) -> Any:
        results = jax.tree.leaves(case.call(nnx.merge(graph, state), given))
        out = jnp.concatenate([each.reshape(-1) for each in results])
        return out @ dout, out

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, out), (by_weights, by_inputs) = both(state, drawn(case.inputs, 1))
    hold(f"{name}, output", {"": out}, {"": want["out"].reshape(-1)}, 2e-5)
    nnx.update(module, by_weights)  # so that gradients come out under diffusers' names, too
    got = ma.weights.to_diffusers(module) | {f"in.{k}": np.asarray(v) for k, v in by_inputs.items()}
    # The bias of keys moves all scores of a query alike: its gradient is 0 but for rounding.
    least = max(float(np.abs(v).max()) for v in grads.values()) / 100
    hold(f"{name}, gradients", got, grads, 1e-4, least)


# Attentions of other shapes, and none of a model whose other one is here.
QUICK = (
    "flux1_double", "chroma_single", "flux2_single", "flux3", "sd35", "qwen_image", "z_image",
    "lumina2", "krea2", "pixart_self", "sdxl_cross_masked", "wan_self", "wan_cross", "cogvideox",
    "mochi", "kandinsky5_cross", "minimax_h3", "hunyuan_video_double", "hunyuan_video_15",
    "ltx2_self", "ltx2_audio_to_video",
)  # fmt: skip


@pytest.mark.parametrize("name", but(FAMILIES, QUICK))
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
