"""LoRA: low-rank changes of projections, merged into their kernels.

    W' = W + scale * alpha / rank * B A,  A [rank, in], B [out, rank]

Source: Hu et al., https://arxiv.org/abs/2106.09685; the names are those that diffusers and peft
save.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxattn.config.numbers import finite
from maxattn.errors import WeightsError
from maxattn.weights import checks
from maxattn.weights.access import variable_at
from maxattn.weights.lora_files import Lora, read_lora, whole
from maxattn.weights.names import Entry


def merge_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    scale: float = 1.0,
    *,
    prefix: str = "",
) -> tuple[str, ...]:
    """Add LoRA weights to the kernels they are for, in place; return the layers that changed.

    The sums are made in float32.

    Args:
        module: whose Linear layers the names mean.
        tensors: a safetensors file or folder, or a state dict, with `<layer>.lora_A.weight` [rank,
            in] and `<layer>.lora_B.weight` [out, rank] (or lora.down, lora.up). A layer's alpha is
            `<layer>.alpha`; else what the metadata say, alpha_pattern before lora_alpha; else the
            rank. Metadata are `lora_adapter_metadata` in the header, as diffusers saves it, or
            peft's adapter_config.json in the folder or beside adapter_model.safetensors; a state
            dict has none. With their `use_rslora`, their alpha is divided by the root of the rank.
        scale: multiplies the change; -1 takes a merged one out again, up to rounding.
        prefix: of the names in `tensors`, such as "transformer."; it also picks the metadata of
            that part where the header has several. peft's names begin with "base_model.model.".

    Raises:
        WeightsError: a name that is no layer of the module or no part of LoRA, half a pair, two
            pairs for one layer, wrong shapes or dtypes, rank 0, a scale or alpha that is no finite
            number, metadata that are broken, are for other parts alone, or are of DoRA or another
            method, or a sum that the kernel's dtype does not hold. Nothing is changed then.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> from maxattn.weights import merge_lora
        >>> class Model(nnx.Module):
        ...     def __init__(self):
        ...         self.to_q = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        >>> model = Model()
        >>> before = model.to_q.kernel[...]
        >>> a, b = np.ones((2, 4), np.float32), np.ones((4, 2), np.float32)
        >>> merge_lora(model, {"to_q.lora_A.weight": a, "to_q.lora_B.weight": b}, scale=0.5)
        ('to_q',)
        >>> bool(np.allclose(model.to_q.kernel[...] - before, 0.5 * (b @ a).T, atol=1e-6))
        True
    """
    _check_scale(scale)
    lora = read_lora(module, tensors, prefix)

    # All are read and checked first: what cannot be read or added changes nothing.
    changes = {layer: _change(lora, layer, scale) for layer in lora.layers}
    for layer, change in changes.items():
        _check_sum(module, lora.entries[layer], change)
    for layer, change in changes.items():
        _add(module, lora.entries[layer], change.whole())
    return tuple(changes)


def check_lora(
    module: nnx.Module, tensors: Mapping[str, Any] | str | Path, *, prefix: str = ""
) -> tuple[str, ...]:
    """Check LoRA weights against a module and change nothing; return the layers that they are for.

    Args:
        module: with arrays or, from `nnx.eval_shape`, without.
        tensors, prefix: as for `merge_lora`.

    Raises:
        WeightsError: as `merge_lora` would, but for sums.
    """
    return tuple(read_lora(module, tensors, prefix).layers)


def _check_scale(scale: Any) -> None:
    number = scale.item() if getattr(scale, "shape", None) == () else scale
    if finite(number) is None:
        said = repr(scale) if isinstance(scale, str | float) else type(scale).__name__
        remedy = "use 1.0 for the change as it is"
        raise WeightsError("scale", said, "it is a finite number", remedy)


class _LoraChange(NamedTuple):
    """Hold what is added to a kernel: factor * up @ down, [out, in]."""

    down: np.ndarray
    up: np.ndarray
    factor: float

    def whole(self) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.factor * (self.up @ self.down)

    def at_most(self) -> float:
        """Return what no number of it exceeds, without the product."""
        with np.errstate(over="ignore", invalid="ignore"):
            return abs(self.factor) * float((abs(self.up) @ abs(self.down).max(axis=1)).max())


def _change(lora: Lora, layer: str, scale: float) -> _LoraChange:
    down, up = (whole(lora.tensors, name) for name in lora.layers[layer])
    return _LoraChange(down, up, scale * lora.factors[layer])


def _check_sum(module: nnx.Module, entry: Entry, change: _LoraChange) -> None:
    """Refuse a change after which finite numbers of a kernel would not be."""
    old = jnp.asarray(checks.value_at(module, entry))
    old = old if entry.layer is None else old[entry.layer]
    most, finite = float(jnp.finfo(old.dtype).max), jnp.isfinite(old)
    # Nearly every change is far from that: its product, most of the work, is then taken only once,
    # to be added.
    if float(jnp.abs(jnp.where(finite, old, 0)).max()) + change.at_most() < most / 2:
        return
    if not bool((jnp.isfinite(_sum(old, jnp.asarray(change.whole().T))) | ~finite).all()):
        limit = f"the kernel is {old.dtype.name}, which ends at {most:g}"
        rule = f"{limit}, and with the change it would go beyond"
        wider = "" if old.dtype == jnp.float32 else ", or merge into float32 parameters"
        layer = entry.name.removesuffix(".weight")
        raise WeightsError("LoRA", layer, rule, f"take a smaller scale{wider}")


def _add(module: nnx.Module, entry: Entry, change: np.ndarray) -> None:
    variable, old = variable_at(module, entry.path), jnp.asarray(checks.value_at(module, entry))
    # [out, in] -> [in, out]
    added = jnp.asarray(change.T)
    if entry.layer is None:
        variable.set_value(_sum(old, added))
    else:  # only the layer's slice is in float32: a stack of all may be half of a device's memory
        variable.set_value(old.at[entry.layer].set(_sum(old[entry.layer], added)))


def _sum(old: jax.Array, added: jax.Array) -> jax.Array:
    return (old.astype(jnp.float32) + added).astype(old.dtype)
