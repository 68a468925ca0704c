"""LoRA: low-rank changes of projections, merged into their kernels in float32.

    W' = W + scale * alpha / rank * B A,  A [rank, in], B [out, rank]

Source: Hu et al., https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxattn.config.numbers import finite
from maxattn.errors import WeightsError
from maxattn.weights import checks, lora_names
from maxattn.weights.checks import FLOATING, dtype_name, first_of
from maxattn.weights.files import SafeTensors, read_slice
from maxattn.weights.layer_names import ModuleNames, names_of
from maxattn.weights.lora_settings import Strength, read_strength
from maxattn.weights.name_tables import check_used
from maxattn.weights.names import Entry, variable_at

log = logging.getLogger("maxattn")
NO_ALPHA = "LoRA: no alpha found, so it is the rank, and B A has the factor 1"
_PASS_A_FILE = "a state dict of peft or diffusers has lost alpha, so pass the file or folder"
_INTEGER = re.compile(r"u?int(8|16|32|64)")
_BEYOND = np.errstate(over="ignore", invalid="ignore")  # `_check_sum` refuses an overflow


class LoraLayers(tuple[str, ...]):
    """The layers that LoRA weights change; `left_out` names what `strict=False` left out.

    `lacks_alpha`: neither the tensors nor metadata have the alpha of some layer.
    """

    left_out: tuple[str, ...] = ()
    lacks_alpha: bool = False


def merge_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    scale: float = 1.0,
    *,
    prefix: str | None = None,
    strict: bool = True,
    names: Mapping[str, Any] | str | Path | None = None,
) -> LoraLayers:
    """Add LoRA weights to their kernels, in place; return the layers that changed.

    Args:
        module: any NNX module with the Linear and Conv layers that `tensors` names.
        tensors: a safetensors file or folder, or a state dict, with `<layer>.lora_A.weight` [rank,
            in] and `<layer>.lora_B.weight` [out, rank] (or lora.down, lora_down, lora.up, lora_up).
            A convolution has `[rank, in, *window]` and `[out, rank, 1, ...]`. `<layer>.diff` and
            `<layer>.diff_b` are added to weight and bias, multiplied only by `scale`;
            `<layer>.lora_B.bias` is added to the bias as the matrices are to the weight. Layers may
            have diffusers' names, names of their model's own code (Wan, Stability's UNets, Flux.1,
            Z-Image, LTX-2), or either with underscores for dots.
            The alpha of a layer is `<layer>.alpha`; else alpha_pattern or lora_alpha in the
            metadata; else the rank. The metadata are `lora_adapter_metadata` in the header, which
            diffusers writes, or peft's adapter_config.json in the folder or beside
            adapter_model.safetensors; a state dict has none. If the metadata set `use_rslora`, an
            alpha in the metadata is divided by the root of the rank.
        scale: multiplies the change; -1 undoes a merge, up to rounding.
        prefix: prefix of the names in `tensors`, such as "transformer."; it also selects that part
            of the metadata. None finds the prefix that diffusers, peft, ComfyUI or kohya's programs
            write, and logs it if the file has other parts.
        strict: True refuses layers that the module lacks or that have other shapes, and names that
            are not LoRA's; False leaves such layers out whole, logs the first and returns all.
        names: names of layers in `tensors` -> names in the module, for a model of your own; or the
            path of a YAML file with this mapping. `*` is a number. A list of layers is one tensor
            with their rows: {"b.*.qkv": ["blocks.*.to_q", "blocks.*.to_k", "blocks.*.to_v"]}.

    Raises:
        WeightsError: a name is not LoRA's or not a layer of the module, `names` does not fit the
            module or the file, several prefixes fit, a layer has one matrix or two pairs, a shape
            or dtype is wrong, the rank is 0, a scale or alpha is not finite, the metadata are
            broken, are only for other parts or are for another method such as DoRA, or the sum
            overflows the kernel's dtype. The module then does not change.

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
    layers, read = _read_lora(module, tensors, prefix, strict, names)

    # All changes are read and checked before the module changes, so that an error changes nothing.
    changes = [(entry, change._replace(factor=scale * change.factor)) for entry, change in read]
    for entry, change in changes:
        _check_sum(module, entry, change)
    for entry, change in changes:
        _add(module, entry, change)
    if layers.lacks_alpha and isinstance(tensors, str | os.PathLike | SafeTensors):
        log.info(NO_ALPHA)
    elif layers.lacks_alpha:
        log.warning("%s; %s", NO_ALPHA, _PASS_A_FILE)
    if left_out := layers.left_out:
        count, listed = len(layers) + len(left_out), ", ".join(first_of(left_out))
        log.warning("LoRA: %d of %d layers are left out: %s", len(left_out), count, listed)
    return layers


def check_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    *,
    prefix: str | None = None,
    strict: bool = True,
    names: Mapping[str, Any] | str | Path | None = None,
) -> LoraLayers:
    """Check LoRA weights against a module, which may lack arrays; return their layers.

    The arguments are as for `merge_lora`.

    Raises:
        WeightsError: as for `merge_lora`, except for overflow.
    """
    layers, changes = _read_lora(module, tensors, prefix, strict, names)
    for _ in changes:  # each is checked as it is read
        pass
    return layers


def lora_prefix(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    names: Mapping[str, Any] | str | Path | None = None,
) -> str:
    """Return the prefix that `merge_lora` finds for a module, which may lack arrays.

    Raises:
        WeightsError: layers of the module have several prefixes.
    """
    return lora_names.find_prefix(checks.tensors(tensors), names_of(module, names))


# ---- reading and checks --------------------------------------------------------------------------


class LoraChange(NamedTuple):
    """The change of a parameter: factor * up @ down (B A), or factor * up if down is None."""

    up: np.ndarray
    down: np.ndarray | None
    factor: float

    @_BEYOND
    def whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the change of a parameter, in its shape."""
        product = self.up if self.down is None else self.up @ self.down
        return (self.factor * product).reshape(shape)

    @_BEYOND
    def at_most(self) -> float:
        """Return an upper bound of the change's absolute values, without computing the product."""
        bound = abs(self.up) if self.down is None else abs(self.up) @ abs(self.down).max(axis=1)
        return abs(self.factor) * float(bound.max(initial=0.0))


def _read_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    prefix: str | None,
    strict: bool,
    table: Mapping[str, Any] | str | Path | None,
) -> tuple[LoraLayers, Iterator[tuple[Entry, LoraChange]]]:
    """Check names, shapes and dtypes; return the layers, and the changes, read on demand."""
    known, held = names_of(module, table), checks.tensors(tensors)
    if prefix is None:
        prefix = lora_names.find_prefix(held, known)
        lora_names.log_part(prefix, held)
    checks.prefix(prefix)
    strength = read_strength(held, prefix)
    if table is not None:
        written = (
            lora_names.layer_of(n.removeprefix(prefix)) for n in held if n.startswith(prefix)
        )
        check_used(known.own, dict.fromkeys(filter(None, written)), prefix)
    held, split = lora_names.split_lora(held, prefix, known, strict)
    names = [name for name in held if name.startswith(prefix)]
    layers, unknown = lora_names.layers_of(names, prefix, known, strict)
    checks.arrays(names, held)
    if unknown or not layers:
        help_ = (
            lora_names.remedy(unknown, prefix, list(held), known, len(layers)) if unknown else ""
        )
        _check_unknown(unknown, len(layers), strict, help_)
    misfits = {layer: wrong for layer in layers if (wrong := _misfit(layer, layers, known, held))}
    if misfits and (strict or len(misfits) == len(layers)):
        raise next(iter(misfits.values()))
    left_out = (*unknown, *(layers.pop(layer).written for layer in misfits))

    factors = {}
    for layer, (written, its) in layers.items():
        if "down" in its:
            rank = held[its["down"]].shape[0]
            if "alpha" in its:  # divided by the rank, also with rsLoRA in the metadata
                factors[layer] = _checked_alpha(its["alpha"], held) / rank
            else:  # the metadata name layers as the file does
                factors[layer] = strength.of(split.get(layer, written), rank)
    used = (its.tensors.items() for its in layers.values())
    checks.dtypes([name for its in used for kind, name in its if kind != "alpha"], held)

    def changes() -> Iterator[tuple[Entry, LoraChange]]:
        for layer, factor in factors.items():
            its = layers[layer].tensors
            down, up = (_finite(its[kind], held) for kind in ("down", "up"))
            down, up = down.reshape(len(down), -1), up.reshape(len(up), -1)
            yield known.kernels[layer], LoraChange(up, down, factor)
        for layer, its in layers.items():
            for kind, name, entry in _differences(layer, its, known):
                factor = factors[layer] if kind == "up_b" else 1.0
                yield entry, LoraChange(_finite(name, held), None, factor)

    found = LoraLayers(layers)
    found.left_out = left_out
    pairs = [its.tensors for its in layers.values() if "down" in its.tensors]
    found.lacks_alpha = strength == Strength() and not all("alpha" in its for its in pairs)
    return found, changes()


def _differences(
    layer: str, its: lora_names.LoraLayer, known: ModuleNames
) -> list[tuple[str, str, Entry]]:
    """Return the kinds and names of tensors that are added whole, and their parameters."""
    return [
        (kind, its.tensors[kind], entry)
        for kind, end in lora_names.DIFFERENCES.items()
        if kind in its.tensors and (entry := known.parameter(layer, end)) is not None
    ]


def _misfit(
    layer: str,
    layers: Mapping[str, lora_names.LoraLayer],
    known: ModuleNames,
    held: Mapping[str, Any],
) -> WeightsError | None:
    """Return the error of a layer whose tensors have other shapes than the module's, or None."""
    its = layers[layer]
    if "down" in its.tensors:
        names = its.tensors["down"], its.tensors["up"]
        if wrong := _wrong_pair(layer, *names, known.kernels[layer], held):
            return wrong
    for _, name, entry in _differences(layer, its, known):
        if _trimmed(shape := tuple(held[name].shape)) != _trimmed(entry.shape):
            rule = f"it must have the shape of {entry.name}, to which it is added: {entry.shape}"
            return WeightsError("LoRA", f"{name}: {shape}", rule, lora_names.OTHER_MODEL)
    return None


def _check_scale(scale: Any) -> None:
    number = scale.item() if getattr(scale, "shape", None) == () else scale
    if finite(number) is None:
        shown = repr(scale) if isinstance(scale, str | float) else type(scale).__name__
        remedy = "use 1.0 for the full change"
        raise WeightsError("scale", shown, "it must be a finite number", remedy)


def _check_unknown(unknown: list[str], known: int, strict: bool, remedy: str) -> None:
    """Refuse layers that the module lacks, if `strict` or if it has no other."""
    count = len(unknown) + known
    if not count:
        rule = "it must have <layer>.lora_A.weight and <layer>.lora_B.weight"
        raise WeightsError("LoRA", "no weights", rule, "pass another file or another prefix")
    if strict or not known:
        not_there = f"{len(unknown)} of {count} are not"
        rule = f"each name must be a Linear or Conv layer of the module, and {not_there}"
        raise WeightsError("LoRA", ", ".join(first_of(unknown)), rule, remedy)


def _wrong_pair(
    layer: str, down: str, up: str, entry: Entry, held: Mapping[str, Any]
) -> WeightsError | None:
    a, b = tuple(held[down].shape), tuple(held[up].shape)
    shapes, (out_size, *inner) = f"{layer}: {a} and {b}", entry.shape
    if a[:1] == (0,) or b[1:] == (0,):
        return WeightsError("LoRA", shapes, "the rank must be at least 1", "leave this layer out")
    rank = a[0] if a else 0
    if _trimmed(a) != _trimmed((rank, *inner)) or _trimmed(b) != (out_size, rank):
        ones = ", 1" * (len(inner) - 1)
        first = f"lora_A must be [rank, {', '.join(map(str, inner))}]"
        rule = f"{first} and lora_B [{out_size}, rank{ones}]"
        return WeightsError("LoRA", shapes, rule, lora_names.OTHER_MODEL)
    return None


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop trailing axes of size 1, such as a window of one pixel."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _checked_alpha(name: str, held: Mapping[str, Any]) -> float:
    shape, dtype = tuple(held[name].shape), dtype_name(held[name].dtype)
    if prod(shape) != 1:
        wrong, rule = f"shape {shape}", "an alpha must be one number"
    elif not (dtype in FLOATING or _INTEGER.fullmatch(dtype)):
        wrong, rule = dtype, "an alpha must be an integer, or a number of 16 bits or more"
    elif not isfinite(alpha := float(_in_float32(name, held).reshape(()))):
        wrong, rule = str(alpha), "an alpha must be a finite number"
    else:
        return alpha
    remedy = "leave it out if it equals the rank; download a broken file again"
    raise WeightsError("LoRA", f"{name}: {wrong}", rule, remedy)


def _finite(name: str, held: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor on the host in float32; refuse infinities and NaN."""
    found = _in_float32(name, held)
    if not np.isfinite(found).all():
        remedy = "train at a lower learning rate; download a broken file again"
        raise WeightsError("LoRA", name, "its numbers must be finite", remedy)
    return found


def _in_float32(name: str, held: Mapping[str, Any]) -> np.ndarray:
    with np.errstate(over="ignore"):
        return read_slice(held, name, (slice(None),) * len(held[name].shape)).astype(np.float32)


# ---- the sum -------------------------------------------------------------------------------------


def _check_sum(module: nnx.Module, entry: Entry, change: LoraChange) -> None:
    """Refuse a change with which finite numbers of a parameter would overflow its dtype."""
    old = jnp.asarray(checks.value_at(module, entry))
    old = old if entry.layer is None else old[entry.layer]
    most, finite = float(jnp.finfo(old.dtype).max), jnp.isfinite(old)
    # Most sums are far from the limit, and the bound shows it without the costly product.
    if float(jnp.abs(jnp.where(finite, old, 0)).max()) + change.at_most() < most / 2:
        return
    if not bool((jnp.isfinite(_sum(old, entry, change)) | ~finite).all()):
        rule = f"the sum must fit into the kernel's {old.dtype.name}, whose largest number is"
        wider = "" if old.dtype == jnp.float32 else ", or merge into float32 parameters"
        remedy = f"use a smaller scale{wider}"
        name = entry.name.removesuffix(".weight")
        raise WeightsError("LoRA", name, f"{rule} {most:g}", remedy)


def _add(module: nnx.Module, entry: Entry, change: LoraChange) -> None:
    variable, old = variable_at(module, entry.path), jnp.asarray(checks.value_at(module, entry))
    if entry.layer is None:
        variable.set_value(_sum(old, entry, change))
    else:  # only one layer in float32: the whole stack may be half of a device's memory
        variable.set_value(old.at[entry.layer].set(_sum(old[entry.layer], entry, change)))


def _sum(old: jax.Array, entry: Entry, change: LoraChange) -> jax.Array:
    added: Any = change.whole(entry.shape)
    return (old.astype(jnp.float32) + jnp.asarray(added.transpose(entry.axes))).astype(old.dtype)
