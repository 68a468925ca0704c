"""swap in models that others wrote: the same outputs and gradients before and after, the same
parameters.

They are not copied here. Where their sources are, the tests run:

    git clone https://github.com/jax-ml/bonsai && git -C bonsai checkout 36284254cf73
    git clone https://github.com/google/flax && git -C flax checkout 18f8f311c275
    PYTHONPATH=bonsai MAXATTN_FLAX_DOCS=flax/docs_nnx/examples python -m pytest -n 0
    tests/modules/test_swap_foreign.py

The models need nothing that maxattn[dev] does not bring.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma

CONFIGS = {
    "dense": ma.AttentionConfig(attention="dot_product", cross_attention="dot_product"),
    "blockwise": ma.AttentionConfig(
        use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=4
    ),
}
RUNS = {
    "dense": "runs    dot_product (XLA dense)",
    "blockwise": "runs    dot_product, memory-efficient",
}
Model = tuple[nnx.Module, Callable[[Any], jax.Array], int]


def of_docs(name: str) -> dict[str, Any]:
    """Run the imports of flax and jax, and the classes, of one of flax's example pages."""
    folder = os.environ.get("MAXATTN_FLAX_DOCS")
    if folder is None:
        pytest.skip("MAXATTN_FLAX_DOCS names no folder of flax's example pages")
    text = (Path(folder) / f"{name}.md").read_text()
    cells = re.findall(r"```(?:\{code-cell\}.*?\n|python\n)(.*?)```", text, re.DOTALL)
    code = "\n".join(
        line for cell in cells for line in cell.splitlines() if not line.startswith(("!", "%", ":"))
    )
    tree = ast.parse(code)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "nnx.Module" in ast.unparse(node)
    ]
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "nnx": nnx}
    exec(compile(tree, name, "exec"), names)
    return names


def images(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def tokens(*shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(2), shape, 0, 40)


def bonsai_vit() -> Model:
    vit = pytest.importorskip(
        "bonsai.models.vit.modeling", reason="bonsai's sources are not on the path"
    )
    small = replace(
        vit.ModelConfig.vit_p16_224(),
        image_size=(64, 64),
        hidden_dim=48,
        num_heads=4,
        mlp_dim=64,
        num_layers=2,
        num_labels=7,
    )
    model = vit.ViTClassificationModel(small, rngs=nnx.Rngs(0))
    return model, lambda m: m(images(2, 64, 64, 3), rngs=nnx.Rngs(1)), 2


def bonsai_whisper() -> Model:
    whisper = pytest.importorskip(
        "bonsai.models.whisper.modeling", reason="bonsai's sources are not on the path"
    )
    small = replace(
        whisper.ModelConfig.whisper_tiny(),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        vocab_size=40,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        max_source_positions=24,
    )
    model = whisper.Whisper(small, rngs=nnx.Rngs(0))
    sound, said = images(2, 48, 80), tokens(2, 9)
    mask = nnx.make_causal_mask(said)
    return model, lambda m: m.decoder(said, mask, m.encoder(sound), None, decode=False), 6


def flax_diffusion() -> Model:
    model = of_docs("digits_diffusion_model")["UNet"](1, 1, 8, rngs=nnx.Rngs(0))
    return model, lambda m: m(images(2, 16, 16, 1), jnp.array([0.1, 0.8])), 3


def flax_translation() -> Model:
    kind = of_docs("machine_translation")["TransformerModel"]
    model = kind(20, 40, 32, 48, 4, 0.0, nnx.Rngs(0))
    return model, lambda m: m(tokens(2, 20), tokens(2, 13)), 3


MODELS = (bonsai_vit, bonsai_whisper, flax_diffusion, flax_translation)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_same_outputs_and_gradients(
    make: Callable[[], Model],
    config: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A plan that another test has met would not be announced again.
    monkeypatch.setattr(sys.modules["maxattn.announce"], "_announced", set())
    caplog.set_level(logging.INFO, logger="maxattn")
    model, call, attentions = make()
    before = nnx.state(model)

    def both(model: nnx.Module) -> Any:
        def loss(model: nnx.Module) -> Any:
            out = call(model)
            return jnp.sum(jnp.sin(out)), out

        (_, out), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        return out, jax.tree.leaves(grads)

    run = nnx.jit(both)
    out, gradients = run(model)
    assert not [record for record in caplog.records if record.name == "maxattn"]
    table = ma.swap(model, CONFIGS[config])
    print(table)
    assert len(table.swapped) == attentions and not table.left
    again, again_gradients = run(model)
    plans = [record.getMessage() for record in caplog.records if record.name == "maxattn"]
    assert plans and all(RUNS[config] in plan for plan in plans), "maxattn attends now, as asked"
    print(f"output: {np.abs(again - out).max() / np.abs(out).max():.1e} of its scale")
    np.testing.assert_allclose(again, out, atol=2e-5 * np.abs(out).max())
    # Some are zero but for rounding (a key's bias moves no softmax): those are held to the scale of
    # all.
    scale = max(float(np.abs(want).max()) for want in gradients)
    most = max(float(np.abs(a - b).max()) for a, b in zip(again_gradients, gradients, strict=True))
    print(f"gradients: {most / scale:.1e} of the largest")
    for got, want in zip(again_gradients, gradients, strict=True):
        np.testing.assert_allclose(
            got, want, atol=1e-4 * max(float(np.abs(want).max()), 1e-2 * scale)
        )
    after = nnx.state(model)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


def test_what_has_an_attention_of_its_own_is_left_and_said() -> None:
    gemma = pytest.importorskip(
        "bonsai.models.gemma3.modeling", reason="bonsai's sources are not on the path"
    )
    kinds = [getattr(gemma, name) for name in ("SiglipAttention", "Gemma3Attention")]
    # Their sizes are billions: the shapes alone say what swap needs.
    config = gemma.ModelConfig.gemma3_4b_it(norm_dtype=jnp.float32)
    model = nnx.eval_shape(lambda: gemma.Gemma3Model(config, rngs=nnx.Rngs(0)))
    table = ma.swap(model)
    assert {row.kind for row in table.left} == {kind.__name__ for kind in kinds}
    assert all("call maxattn.attention in it" in row.why for row in table.left)
