"""diffusers' transformers with random weights, and inputs of the sizes that measure.py takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]
BF16 = torch.bfloat16
GUIDANCE = 3.5

FLUX = {"guidance_embeds": True}
FLUX_TINY = {
    "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
WAN = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
TI2V = {
    "num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48,
    "out_channels": 48,
}  # fmt: skip
WAN_TINY = {
    "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32,
    "text_dim": 32, "freq_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model of diffusers on the device, and its inputs.

    Args:
        name: of it and of its sizes.
        transformer: diffusers' module.
        inputs: a step changes "latents".
        predict: from the transformer, latents, a time in 0..1 for each batch row, and the inputs.
    """

    name: str
    transformer: Any
    inputs: Inputs
    predict: Callable[[Any, torch.Tensor, torch.Tensor, Inputs], torch.Tensor]


def make(
    name: str, tiny: bool, layers: Sequence[int] | None, device: str, dtype: torch.dtype = BF16
) -> Model:
    """Make a model by its name in `MAKE`; `layers` of Flux are double and single ones."""
    torch.manual_seed(0)
    with torch.device(device):
        return MAKE[name](tiny, layers, dtype)


# ---- Flux.1 --------------------------------------------------------------------------------------


def flux(tiny: bool, layers: Sequence[int] | None, dtype: torch.dtype) -> Model:
    """Make FLUX.1-dev for 1024x1024, batch 1 and 512 tokens of text."""
    from diffusers import FluxTransformer2DModel  # type: ignore[attr-defined]  # not the file beside

    counts = dict(zip(("num_layers", "num_single_layers"), layers or (), strict=False))
    model = built(FluxTransformer2DModel, FLUX | (FLUX_TINY if tiny else {}) | counts, dtype)
    rows, columns, text = (2, 3, 5) if tiny else (64, 64, 512)
    sizes = model.config
    inputs = {
        "latents": torch.randn(1, rows * columns, sizes.in_channels),
        "text": torch.randn(1, text, sizes.joint_attention_dim, dtype=BF16),
        "pooled": torch.randn(1, sizes.pooled_projection_dim, dtype=BF16),
        "img_ids": picture_ids(rows, columns),
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.full((1,), GUIDANCE),
    }
    depth = f"{sizes.num_layers} + {sizes.num_single_layers} layers"
    return Model(f"diffusers flux, {depth}, {rows * columns} tokens", model, inputs, of_flux)


def picture_ids(rows: int, columns: int) -> torch.Tensor:
    """Number the tokens of a picture, [T, 3] float: 0, row, column."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack((0 * row, row, column), dim=-1).reshape(-1, 3).float()


def of_flux(model: Any, x: torch.Tensor, at: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Predict the velocity of Flux's latents."""
    same = {name: inputs[name] for name in ("img_ids", "txt_ids", "guidance")}
    texts = {"encoder_hidden_states": inputs["text"], "pooled_projections": inputs["pooled"]}
    return model(hidden_states=x.to(BF16), timestep=at, **texts, **same, return_dict=False)[0]


# ---- Wan -----------------------------------------------------------------------------------------


def wan(tiny: bool, layers: Sequence[int] | None, dtype: torch.dtype) -> Model:
    """Make Wan 2.1 1.3B for 81 frames of 832x480."""
    sides = (3, 4, 6) if tiny else (21, 60, 104)
    return _wan("wan 1.3B", sized(WAN, tiny, layers), sides, tiny, dtype)


def ti2v(tiny: bool, layers: Sequence[int] | None, dtype: torch.dtype) -> Model:
    """Make Wan 2.2 TI2V-5B for 121 frames of 1280x704, with a time for each token.

    diffusers' pipeline gives these where `expand_timesteps` is set, as in the model's own folder.
    """
    sides = (3, 4, 6) if tiny else (31, 44, 80)
    return _wan("wan 2.2 TI2V-5B", sized(TI2V, tiny, layers), sides, tiny, dtype, by_token=True)


def sized(sizes: dict[str, Any], tiny: bool, layers: Sequence[int] | None) -> dict[str, Any]:
    """Change the sizes of a Wan as the command line asks."""
    counts = {"num_layers": layers[0]} if layers else {}
    return sizes | (WAN_TINY if tiny else {}) | counts


def _wan(
    name: str,
    sizes: dict[str, Any],
    sides: tuple[int, int, int],
    tiny: bool,
    dtype: torch.dtype,
    by_token: bool = False,
) -> Model:
    from diffusers import WanTransformer3DModel  # type: ignore[attr-defined]  # not the file beside

    model = built(WanTransformer3DModel, sizes, dtype)
    config = model.config
    inputs = {
        "latents": torch.randn(1, config.in_channels, *sides),
        "text": torch.randn(1, 5 if tiny else 512, config.text_dim, dtype=BF16),
    }
    tokens = sides[0] * sides[1] * sides[2] // 4

    def predict(model: Any, x: torch.Tensor, at: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        time = 1000 * at
        time = time[:, None].expand(-1, tokens) if by_token else time
        return model(x.to(BF16), time, inputs["text"], return_dict=False)[0]

    called = f"diffusers {name}, {config.num_layers} layers, {tokens} tokens"
    return Model(called, model, inputs, predict)


MAKE = {"flux": flux, "wan": wan, "ti2v": ti2v}


# ---- weights -------------------------------------------------------------------------------------


def built(kind: Any, sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build a transformer with weights of a dtype, but those that diffusers keeps in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = kind(**sizes)
    finally:
        torch.set_default_dtype(before)
    kept = set(kind._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if kept & set(name.split(".")):
            tensor.data = tensor.data.float()
    return model
