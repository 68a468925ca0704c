"""swap in MaxDiffusion's own modules: equal outputs, gradients and parameters.

Its source is not part of maxattn. With a checkout the tests run:

    git clone https://github.com/AI-Hypercomputer/maxdiffusion
    git -C maxdiffusion checkout 7cfb8801d41d
    MAXATTN_MAXDIFFUSION=maxdiffusion/src python -m pytest -n 0 -s
    tests/modules/test_swap_maxdiffusion_source.py

Its modules need beside maxattn[dev]: aqtp, chex, google-cloud-storage, huggingface_hub, msgpack,
regex, requests, tensorboardX and torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import maxattn as ma
from tests.modules.test_swap import check_same

HEADS, HEAD_DIM, BATCH, TOKENS = 4, 16, 4, 24
WIDTH = HEADS * HEAD_DIM
AXES = ("data", "fsdp", "context", "tensor")
CONFIGS = {
    "dense": ma.AttentionConfig(attention="dot_product", cross_attention="dot_product"),
    "blockwise": ma.AttentionConfig(
        use_memory_efficient_attention=True, query_chunk_size=8, key_chunk_size=8
    ),
}
Made = tuple[nnx.Module, Callable[[Any], Any], int]


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = os.environ.get("MAXATTN_MAXDIFFUSION")
    if folder is None:
        pytest.skip("MAXATTN_MAXDIFFUSION names no folder of MaxDiffusion's source")
    monkeypatch.syspath_prepend(folder)
    return Path(folder)


def of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"maxdiffusion.models.{module}"), name)


def numbers(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def wan(mesh: Any = None, **more: Any) -> Any:
    sizes = {"query_dim": WIDTH, "heads": HEADS, "dim_head": HEAD_DIM, "mesh": mesh}
    attention = of("attention_flax", "FlaxWanAttention")
    return attention(nnx.Rngs(0), **sizes, attention_kernel="dot_product", **more)


def states(keys: int = 10) -> tuple[jax.Array, jax.Array]:
    return numbers(1, BATCH, TOKENS, WIDTH), numbers(2, BATCH, keys, WIDTH)


def wan_self(mesh: Any = None) -> Made:
    x, angles = states()[0], jnp.exp(1j * numbers(5, 1, 1, TOKENS, HEAD_DIM // 2))
    return wan(mesh), lambda m: m(x, rotary_emb=angles), 1


def wan_cross(mesh: Any = None) -> Made:
    return wan(mesh, is_self_attention=False), lambda m: m(*states()), 1


def wan_cached(mesh: Any = None) -> Made:
    x, text = states()
    cached = lambda m: m(x, text, cached_kv=m.compute_kv(text))  # noqa: E731
    return wan(mesh, is_self_attention=False), cached, 1


def wan_image(mesh: Any = None) -> Made:
    """Image-to-video: 128 slots for 20 image tokens, the rest is padding, then the text."""
    x, keys = states(128 + 10)
    module = wan(mesh, is_self_attention=False, added_kv_proj_dim=WIDTH, image_seq_len=20)
    keep = jnp.broadcast_to((jnp.arange(138) < 20) | (jnp.arange(138) >= 128), (BATCH, 138))
    return module, lambda m: m(x, keys, encoder_attention_mask=keep.astype(jnp.int32)), 1


def padding() -> jax.Array:
    return jnp.arange(TOKENS)[None] < jnp.array([[TOKENS], [5], [20], [TOKENS]])


def ltx2(mesh: Any = None) -> Made:
    module = of("ltx2.attention_ltx2", "LTX2Attention")(
        WIDTH, HEADS, HEAD_DIM, rngs=nnx.Rngs(0), mesh=mesh, attention_kernel="dot_product",
        rope_type="split", gated_attn=True,
    )  # fmt: skip
    x, turn = states()[0], numbers(3, BATCH, HEADS, TOKENS, HEAD_DIM // 2)
    rotary = (jnp.cos(turn), jnp.sin(turn))
    return module, lambda m: m(x, attention_mask=padding(), rotary_emb=rotary), 1


def flux2(mesh: Any = None) -> Made:
    module = of("flux.transformers.transformer_flux_flax", "NNXFluxAttention")(
        nnx.Rngs(0), WIDTH, heads=HEADS, dim_head=HEAD_DIM, mesh=mesh
    )
    return module, lambda m: jnp.concatenate(m(*states()), axis=1), 1


def wan_model(mesh: Any = None) -> Made:
    """The whole model with scanned layers."""
    model = of("wan.transformers.transformer_wan", "WanModel")(
        nnx.Rngs(0), num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, mesh=mesh,
        attention="dot_product", scan_layers=True,
    )  # fmt: skip
    video, text = numbers(1, BATCH, 4, 2, 4, 6), numbers(2, BATCH, 10, 16)
    time = jnp.arange(BATCH) * 100
    return model, lambda m: m(video, time, text, return_dict=False)[0], 2


MODULES = (wan_self, wan_cross, wan_cached, wan_image, ltx2, flux2)
IN_A_MESH = (wan_self, wan_cross, wan_image, ltx2, wan_model)  # the model runs in none without


def both(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives a module's output and the gradients of all parameters."""

    def loss(module: Any) -> Any:
        out = call(module)
        return jnp.sum(jnp.sin(out)), out

    @nnx.jit
    def run(module: Any) -> Any:
        (_, out), grads = nnx.value_and_grad(loss, has_aux=True)(module)
        return out, jax.tree.leaves(nnx.to_pure_dict(grads))

    return run


def parameters(module: Any) -> list[int]:
    return [id(leaf) for _, leaf in nnx.iter_graph(module) if isinstance(leaf, nnx.Param)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_same_outputs_gradients_and_parameters(make: Callable[..., Made], config: str) -> None:
    module, call, ops = make()
    before, params = both(call)(module), parameters(module)
    table = ma.swap(module, CONFIGS[config])
    assert len(table.swapped) == ops and not table.left
    assert parameters(module) == params and params
    check_same(both(call)(module), before, 1e-4)


def shardings(module: nnx.Module) -> list[Any]:
    return [leaf.sharding for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))]


@contextmanager
def in_their_mesh(source: Path, shape: tuple[int, ...]) -> Iterator[Mesh]:
    """Enter a mesh of eight devices with the axis rules of MaxDiffusion's Wan YAML."""
    file = source / "maxdiffusion" / "configs" / "base_wan_14b.yml"
    rules = yaml.safe_load(file.read_text())["logical_axis_rules"]
    as_tuples = [(name, tuple(to) if isinstance(to, list) else to) for name, to in rules]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), AXES)
    with ExitStack() as stack:
        stack.enter_context(mesh)
        stack.enter_context(linen.logical_axis_rules(as_tuples))
        yield mesh


def lay_out(module: nnx.Module, mesh: Mesh) -> None:
    """Place parameters on the mesh by MaxDiffusion's names of their axes."""
    state = nnx.state(module, nnx.Param)

    def place(spec: PartitionSpec) -> NamedSharding:
        # The name of the stacked layers' axis has no rule.
        parts = (None if isinstance(x, str) and x not in AXES else x for x in spec)
        return NamedSharding(mesh, PartitionSpec(*parts))

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    places = jax.tree.map(place, nnx.get_partition_spec(state), is_leaf=is_spec)
    nnx.update(module, jax.device_put(state, places))


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("shape", [(1, 2, 4, 1), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("make", IN_A_MESH, ids=lambda make: make.__name__)
def test_on_eight_devices(
    make: Callable[..., Made], shape: tuple[int, ...], strategy: str, source: Path
) -> None:
    with in_their_mesh(source, shape) as mesh:
        module, call, ops = make(mesh)
        lay_out(module, mesh)
        before, laid = both(call)(module), shardings(module)
        sizes = dict(zip(AXES, shape, strict=True))
        config = ma.AttentionConfig(context_parallel=strategy, **{
            f"ici_{axis}_parallelism": size for axis, size in sizes.items()
        })  # fmt: skip
        assert len(ma.swap(module, config, mesh=mesh).swapped) == ops
        assert shardings(module) == laid
        check_same(both(call)(module), before, 1e-4)


def test_heads_as_an_axis_and_padding() -> None:
    """Z-Image, which computes attention itself unless it is flash: [B, N, T, H], and key flags."""
    kind = of("z_image.transformer_z_image", "ZImageAttention")
    dense = kind(nnx.Rngs(0), WIDTH, HEADS)
    flash = kind(nnx.Rngs(0), WIDTH, HEADS, attention_kernel="flash", flash_min_seq_length=8)
    assert "ZImageAttention attends by itself" in ma.swap(dense).left[0].why
    assert "from flash_min_seq_length=8 tokens on" in str(ma.swap(flash, CONFIGS["dense"]))
    x, turn = states()[0], numbers(3, BATCH, TOKENS, HEAD_DIM // 2)
    rotary = jnp.cos(turn), jnp.sin(turn)
    call = lambda m: m(x, rotary, attention_mask=padding())  # noqa: E731
    check_same(both(call)(flash), both(call)(dense), 1e-4)
