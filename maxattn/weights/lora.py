"""LoRA: low-rank changes of projections, merged into their kernels.

    W' = W + scale * alpha / rank * B A,  A [rank, in], B [out, rank]

Source: Hu et al., https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from maxattn.config.numbers import finite
from maxattn.errors import WeightsError
from maxattn.weights import checks
from maxattn.weights.lora_change import add, check_sum
from maxattn.weights.lora_files import read_lora
from maxattn.weights.lora_names import find_prefix
from maxattn.weights.naming.module_names import names_of


def merge_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    scale: float = 1.0,
    *,
    prefix: str | None = None,
    strict: bool = True,
) -> tuple[str, ...]:
    """Add LoRA weights to the kernels they are for, in place; return the layers that changed.

    The sums are made in float32.

    Args:
        module: whose Linear and Conv layers the names mean.
        tensors: a safetensors file or folder, or a state dict, with `<layer>.lora_A.weight` [rank,
            in] and `<layer>.lora_B.weight` [out, rank] (or lora.down, lora_down, lora.up, lora_up);
            of a convolution `[rank, in, *window]` and `[out, rank, 1, ...]`. `<layer>.diff` and
            `<layer>.diff_b` are added to weight and bias as they are. Layers have diffusers' names,
            those of Wan's or Stability's own code, or any of them with underscores for dots.
            A layer's alpha is `<layer>.alpha`; else what the metadata say, alpha_pattern before
            lora_alpha; else the rank. Metadata are `lora_adapter_metadata` in the header, as
            diffusers saves it, or peft's adapter_config.json in the folder or beside
            adapter_model.safetensors; a state dict has none. With their `use_rslora`, their alpha
            is divided by the root of the rank.
        scale: multiplies the change; -1 takes a merged one out again, up to rounding.
        prefix: of the names in `tensors`, such as "transformer."; it also picks the metadata of
            that part where the header has several. Default the one that diffusers, peft, ComfyUI
            or kohya's programs write; where the file has other parts, the log says which it is.
        strict: refuse layers that the module does not have; False leaves them out and logs them.

    Raises:
        WeightsError: a name that is no layer of the module or no part of LoRA, several prefixes
            that fit, half a pair, two pairs for one layer, wrong shapes or dtypes, rank 0, a scale
            or alpha that is no finite number, metadata that are broken, are for other parts alone,
            or are of DoRA or another method, or a sum that the kernel's dtype does not hold.
            Nothing is changed then.

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
    lora = read_lora(module, tensors, prefix, strict)

    # All are read and checked first: what cannot be read or added changes nothing.
    changes = lora.changes(scale)
    for entry, change in changes:
        check_sum(module, entry, change)
    for entry, change in changes:
        add(module, entry, change)
    return tuple(lora.layers)


def check_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    *,
    prefix: str | None = None,
    strict: bool = True,
) -> tuple[str, ...]:
    """Check LoRA weights against a module and change nothing; return the layers that they are for.

    Args:
        module: with arrays or, from `nnx.eval_shape`, without.
        tensors, prefix, strict: as for `merge_lora`.

    Raises:
        WeightsError: as `merge_lora` would, but for sums.
    """
    return tuple(read_lora(module, tensors, prefix, strict).layers)


def lora_prefix(module: nnx.Module, tensors: Mapping[str, Any] | str | Path) -> str:
    """Return what the names of a module's LoRA begin with, as `merge_lora` finds it.

    Args:
        module: with arrays or, from `nnx.eval_shape`, without.
        tensors: as for `merge_lora`.

    Raises:
        WeightsError: layers of the module stand behind several prefixes.
    """
    return find_prefix(checks.tensors(tensors), names_of(module))


def _check_scale(scale: Any) -> None:
    number = scale.item() if getattr(scale, "shape", None) == () else scale
    if finite(number) is None:
        said = repr(scale) if isinstance(scale, str | float) else type(scale).__name__
        remedy = "use 1.0 for the change as it is"
        raise WeightsError("scale", said, "it is a finite number", remedy)
