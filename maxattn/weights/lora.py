"""LoRA: low-rank changes of projections, merged into their kernels.

    W' = W + scale * alpha / rank * B A,  A [rank, in], B [out, rank]

Source: Hu et al., https://arxiv.org/abs/2106.09685; the names are those that diffusers and peft
save.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxattn.errors import WeightsError, did_you_mean
from maxattn.weights import checks
from maxattn.weights.access import on_host, variable_at
from maxattn.weights.checks import LISTED
from maxattn.weights.lora_alphas import Strength, strength
from maxattn.weights.names import Entry, entries

DOWN, UP = ("lora_A", "lora.down", "lora_down"), ("lora_B", "lora.up", "lora_up")
_PART = re.compile(
    rf"(?P<layer>.+)\.(?P<part>{'|'.join(map(re.escape, (*DOWN, *UP)))})(?:\.default)?\.weight"
)
_ALPHA = re.compile(r"(?P<layer>.+)\.alpha")


def merge_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    scale: float = 1.0,
    *,
    prefix: str = "",
) -> tuple[str, ...]:
    """Add LoRA weights to the kernels they are for, in place, in float32; return the layers that
    changed.

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
    """
    _check_scale(scale)
    held, every, layers, factors = _read(module, tensors, prefix)

    def change(layer: str) -> _Change:
        down, up = layers[layer]
        return _Change(_whole(held[down]), _whole(held[up]), scale * factors[layer])

    for layer in layers:  # all of them first: a file that is refused changes nothing
        _check_sum(module, every[layer], change(layer))
    for layer in layers:
        _add(module, every[layer], change(layer).whole())
    return tuple(layers)


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
    return tuple(_read(module, tensors, prefix)[2])


def _read(
    module: nnx.Module, tensors: Mapping[str, Any] | str | Path, prefix: str
) -> tuple[Mapping[str, Any], dict[str, Entry], dict[str, tuple[str, str]], dict[str, float]]:
    every = {e.name.removesuffix(".weight"): e for e in entries(module) if e.axes == (1, 0)}
    held = checks.tensors(tensors)
    said = strength(held, prefix)
    names = [name for name in held if name.startswith(prefix)]
    layers, alphas = _pairs(names, prefix)
    checks.arrays(names, held)
    _check(layers, every, held)
    checks.dtypes((name for pair in layers.values() for name in pair), held)
    for name in alphas.values():
        _check_alpha(name, held[name])
    return held, every, layers, _factors(layers, alphas, held, said)


def _factors(
    layers: dict[str, tuple[str, str]],
    alphas: dict[str, str],
    held: Mapping[str, Any],
    said: Strength,
) -> dict[str, float]:
    """Return what each product is multiplied by: alpha as a tensor, divided by the rank, before the
    metadata.
    """
    ranks = {layer: held[down].shape[0] for layer, (down, _) in layers.items()}
    return {
        layer: _alpha(held[alphas[layer]]) / rank if layer in alphas else said.of(layer, rank)
        for layer, rank in ranks.items()
    }


def _pairs(names: list[str], prefix: str) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    alphas: dict[str, str] = {}
    for name in names:
        bare = name.removeprefix(prefix)
        if part := _PART.fullmatch(bare):
            side = "down" if part["part"] in DOWN else "up"
            _check_once(
                part["layer"], found.setdefault(part["layer"], {}).setdefault(side, name), name
            )
        elif alpha := _ALPHA.fullmatch(bare):
            alphas[alpha["layer"]] = name
        else:
            rule = (
                "LoRA weights are named <layer>.lora_A.weight, <layer>.lora_B.weight and"
                " <layer>.alpha"
            )
            raise WeightsError("LoRA", name, rule, "save them with diffusers' save_lora_weights")
    if half := [layer for layer, sides in found.items() if len(sides) == 1]:
        side = "up" if "down" in found[half[0]] else "down"
        rule = f"each layer has two matrices, and the {side} one is missing"
        raise WeightsError("LoRA", half[0], rule, "fetch the file again")
    if lone := sorted(alphas.keys() - found.keys()):
        raise WeightsError(
            "LoRA",
            alphas[lone[0]],
            "an alpha belongs to two matrices, and there are none",
            "remove it",
        )
    return {layer: (sides["down"], sides["up"]) for layer, sides in found.items()}, alphas


def _check(
    layers: dict[str, tuple[str, str]], every: dict[str, Entry], held: Mapping[str, Any]
) -> None:
    if not layers:
        rule = "it holds <layer>.lora_A.weight and <layer>.lora_B.weight"
        raise WeightsError("LoRA", "no weights", rule, "give the right file, or the right prefix")
    if unknown := [layer for layer in layers if layer not in every]:
        listed = ", ".join(unknown[:LISTED]) + (
            f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        )
        rule = (
            f"each name is a Linear layer of the module, and {len(unknown)} of {len(layers)}"
            " are not"
        )
        remedy = (
            did_you_mean(unknown[0], every)
            or "pass prefix= where all begin alike, or the module they are for"
        )
        raise WeightsError("LoRA", listed, rule, remedy)
    for layer, (down, up) in layers.items():
        a, b = tuple(held[down].shape), tuple(held[up].shape)
        if a[:1] == (0,) or b[1:] == (0,):
            rule = "the rank is at least 1: with none, nothing changes"
            raise WeightsError("LoRA", f"{layer}: {a} and {b}", rule, "leave this layer out")
        if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != every[layer].shape or a[0] != b[1]:
            rule = (
                f"lora_A is [rank, {every[layer].shape[1]}] and lora_B [{every[layer].shape[0]},"
                " rank]"
            )
            raise WeightsError(
                "LoRA", f"{layer}: {a} and {b}", rule, "give LoRA weights of this model"
            )
        for name in (down, up):
            if not np.isfinite(_whole(held[name])).all():
                raise WeightsError(
                    "LoRA",
                    name,
                    "its numbers are finite",
                    "fetch the file again, or train with less",
                )


def _check_once(layer: str, first: str, name: str) -> None:
    if name != first:
        rule = f"each layer has one pair of matrices, and {layer} has {first} too"
        raise WeightsError(
            "LoRA", name, rule, "keep one spelling: lora_A and lora_B, or lora.down and lora.up"
        )


def _check_scale(scale: Any) -> None:
    try:
        finite = isfinite(scale)
    except TypeError:
        finite = False
    if not finite:
        said = repr(scale) if isinstance(scale, str | float) else type(scale).__name__
        raise WeightsError(
            "scale", said, "it is a finite number", "use 1.0 for the change as it is"
        )


def _check_alpha(name: str, tensor: Any) -> None:
    remedy = "leave it out where it is the rank, or fetch the file again"
    if prod(tensor.shape) != 1:
        raise WeightsError(
            "LoRA", f"{name}: shape {tuple(tensor.shape)}", "an alpha is one number", remedy
        )
    if not isfinite(alpha := _alpha(tensor)):
        raise WeightsError("LoRA", f"{name}: {alpha}", "an alpha is a finite number", remedy)


def _alpha(tensor: Any) -> float:
    return float(_whole(tensor).reshape(()))


def _whole(tensor: Any) -> np.ndarray:
    return on_host(tensor, (slice(None),) * len(tensor.shape)).astype(np.float32)


class _Change(NamedTuple):
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


def _check_sum(module: nnx.Module, entry: Entry, change: _Change) -> None:
    """Refuse a change after which finite numbers of a kernel would not be."""
    old = checks.value_at(module, entry)
    old = old if entry.layer is None else old[entry.layer]
    most, finite = float(jnp.finfo(old.dtype).max), jnp.isfinite(old)
    # Nearly every change is far from that: its product, most of the work, is then taken only once,
    # to be added.
    if float(jnp.abs(jnp.where(finite, old, 0)).max()) + change.at_most() < most / 2:
        return
    if not bool((jnp.isfinite(_sum(old, jnp.asarray(change.whole().T))) | ~finite).all()):
        rule = (
            f"the kernel is {old.dtype.name}, which ends at {most:g}, and with the change it would"
            " go beyond"
        )
        wider = "" if old.dtype == jnp.float32 else ", or merge into float32 parameters"
        raise WeightsError(
            "LoRA", entry.name.removesuffix(".weight"), rule, f"take a smaller scale{wider}"
        )


def _add(module: nnx.Module, entry: Entry, change: np.ndarray) -> None:
    variable, old = variable_at(module, entry.path), checks.value_at(module, entry)
    # [out, in] -> [in, out]
    added = jnp.asarray(change.T)
    if entry.layer is None:
        variable.set_value(_sum(old, added))
    else:  # only the layer's slice is in float32: a stack of all may be half of a device's memory
        variable.set_value(old.at[entry.layer].set(_sum(old[entry.layer], added)))


def _sum(old: jax.Array, added: jax.Array) -> jax.Array:
    return (old.astype(jnp.float32) + added).astype(old.dtype)
