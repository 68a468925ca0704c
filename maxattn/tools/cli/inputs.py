"""Read a command's config, shapes, target and mesh from its options.

Errors name the option whose value is wrong.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.document import read
from maxattn.config.errors import plain
from maxattn.config.load import apply_overrides
from maxattn.config.numbers import LARGEST, MOST_DEVICES, whole, whole_in
from maxattn.config.rules import attentions
from maxattn.config.target_names import read_target
from maxattn.decide import default_target
from maxattn.errors import ConfigError, InputError, MeshError, did_you_mean
from maxattn.target import Target
from maxattn.tools import model_shapes
from maxattn.tools.cli.masks import check_fits, read_mask
from maxattn.tools.cli.options import PACKAGES
from maxattn.tools.model_shapes import Shape


@dataclass(frozen=True)
class Source:
    """CONFIG and key=value as read: the settings, the file's sections after overrides, the file's
    path ("" if only overrides are given), and notes on settings that were translated.
    """

    config: AttentionConfig
    sections: dict[str, Any]
    path: str
    notes: tuple[str, ...] = ()


def read_source(args: argparse.Namespace) -> Source:
    """Read CONFIG and the overrides. A CONFIG that contains `=` is an override of the defaults, and
    a CONFIG that is the name of a known shape is a --shape.
    """
    words = [args.config, *args.overrides]
    named = [word for word in words if word in model_shapes.SHAPES and not os.path.exists(word)]
    args.shape = [*named, *args.shape]
    path, *overrides = [word for word in words if word not in named] or [""]
    if getattr(args, "maxdiffusion", False):
        config, left_out, notes = AttentionConfig.from_maxdiffusion(path, overrides)
        names = (f"left out: {', '.join(left_out)}",) if left_out else ()
        return Source(config, {}, path, (*notes, *names))
    if not path or ("=" in path and not os.path.exists(path)):
        overrides = tuple(text for text in (path, *overrides) if text)
        return Source(AttentionConfig.from_overrides(overrides), {}, "")
    if not os.path.exists(path) and (guess := _guess(path)):
        rule = "it must be a YAML file that exists, a key=value, or the name of a shape"
        raise ConfigError(plain(path), "not found", rule, guess)
    config = AttentionConfig.from_yaml(path, overrides)
    sections = dict(read(path).data)
    apply_overrides(AttentionConfig, sections, overrides)
    return Source(config, sections, path)


def _guess(word: str) -> str:
    """Return a remedy for a word that is no file; "" if none is known."""
    if word in AttentionConfig.model_fields:
        return f"write {word}=VALUE; `maxattn config {word}` lists the values"
    if word in attentions():
        return f"write attention={word}"
    return did_you_mean(word, model_shapes.SHAPES)


def shapes_of(args: argparse.Namespace, source: Source) -> tuple[Shape, ...]:
    """Return the shapes that the options name, else the shapes of the file's sections."""
    found = tuple(model_shapes.read(text) for text in args.shape)
    found = found or model_shapes.of_sections(source.sections)
    if not found:
        rule = "a plan needs a shape, and the file's `model` section describes none"
        names = ", ".join(model_shapes.SHAPES)
        remedy = f"add --shape B,T,S,N,H, or --shape with one of {names}"
        raise InputError("shape", "(none)", rule, remedy)
    mask = None if args.mask is None else read_mask(args.mask)
    changes = (args.role, args.dtype, mask, read_batch(args.batch))
    changed = tuple(model_shapes.changed(shape, *changes) for shape in found)
    for shape in changed:
        _check_mask(shape, args.mask or "")
    return changed


def read_batch(value: int | None) -> int | None:
    """Return --batch, None if it is absent."""
    if value is not None and whole(value) is None:
        rule = "B is at least 1" if value < 1 else f"B is at most {LARGEST}"
        raise InputError("batch", plain(value), rule, "write --batch 1")
    return value


def _check_mask(shape: Shape, mask: str) -> None:
    check_fits(mask, shape.q_len, shape.kv_len, shape.name)
    try:
        shape.call()
    except InputError as error:
        if "offset" not in error.remedy:
            raise
        remedy = f"leave --mask out for {shape.name}, or give a shape with T at most S"
        raise InputError("--mask", error.value, error.rule, remedy) from None


# ---- the machine ---------------------------------------------------------------------------------


def target_of(args: argparse.Namespace, config: AttentionConfig) -> Target:
    """Return the named target, else the config's platform, else this machine."""
    packages = packages_of(args)
    return Target.named(args.target, packages) if args.target else default_target(config)


def packages_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return --with as (package, version) pairs; a missing version is "?"."""
    if not args.target and args.packages:
        rule = "it needs --target: for this machine, installed packages are looked up"
        raise ConfigError("--with", " ".join(args.packages), rule, 'add --target "TPU v5p"')
    pairs = [(text, *text.replace("==", "=").partition("=")[::2]) for text in args.packages]
    for text, name, _ in pairs:
        if name not in PACKAGES:
            rule = f"plans depend only on the packages {', '.join(PACKAGES)}"
            remedy = did_you_mean(name, PACKAGES) or "name one of them, or leave --with out"
            raise InputError("--with", text, rule, remedy)
    return tuple((name, version or "?") for _, name, version in pairs)


def mesh_of(args: argparse.Namespace, config: AttentionConfig) -> dict[str, int]:
    """Return the sizes of --mesh, else the config's, where -1 is the rest of the devices."""
    devices = args.devices
    if devices is not None and whole(devices, most=MOST_DEVICES) is None:
        rule, remedy = f"it must be at most {MOST_DEVICES:,}", "write a smaller number"
        if devices < 1:
            rule, remedy = "it must be at least 1", "write --devices 1 or more"
        raise MeshError("--devices", plain(devices), rule, remedy)
    there = read_target(args.target).devices if args.target else None
    if not args.mesh:
        if there is not None and devices is not None and devices > there:
            remedy = f"write --devices {there}, or a target with more chips"
            raise MeshError("--devices", devices, f"{args.target} has {there} devices", remedy)
        return _mesh_of_config(config, there if devices is None else devices)
    sizes = read_mesh(args.mesh)
    named, words = prod(sizes.values()), ",".join(args.mesh)
    if devices is not None and named != devices:
        rule = f"--mesh {words} has {named} devices"
        remedy = "leave --devices out: it is for the config's mesh"
        raise MeshError("--devices", devices, rule, remedy)
    if there is not None and named > there:
        rule = f"it needs {named} devices, and {args.target} has {there}"
        raise MeshError("--mesh", words, rule, "name a larger topology, or a smaller mesh")
    return sizes


def read_mesh(words: Sequence[str]) -> dict[str, int]:
    """Read the sizes of axes, such as `context=4,fsdp=2`, from one word or several."""
    sizes: dict[str, int] = {}
    for part in filter(None, ",".join(words).replace(" ", ",").split(",")):
        axis, equals, size = (word.strip() for word in part.partition("="))
        number = whole_in(size, least=0, most=MOST_DEVICES)
        if not equals or number is None:
            rule = "it must be axis=size, joined by commas"
            rule = f"an axis has at most {MOST_DEVICES:,} devices" if size.isdecimal() else rule
            raise MeshError("mesh", plain(part), rule, "write --mesh context=4,fsdp=2")
        if axis in sizes:
            remedy = f"leave {axis}={sizes[axis]} or {part} out"
            raise MeshError("mesh", part, f"the axis {axis} is named twice", remedy)
        sizes[axis] = number
    return sizes


def _mesh_of_config(config: AttentionConfig, devices: int | None) -> dict[str, int]:
    sizes = config.axis_parallelism()
    fixed = prod(n for pair in sizes.values() for n in pair if n > 0)
    if devices is not None:
        is_open = any(ici == -1 for ici, _ in sizes.values())
        product = f"the config's parallelisms multiply to {fixed}"
        if devices % fixed:
            least = max(1, devices // fixed) * fixed
            rule = f"{product}, which must divide the devices"
            remedy = f"write --devices {least}, or change an ici_*_parallelism"
            raise MeshError("devices", devices, rule, remedy)
        if devices > fixed and not is_open:
            rule = f"{product}, and no ici_*_parallelism is -1"
            remedy = f"write --devices {fixed}, or set one ici_*_parallelism to -1"
            raise MeshError("devices", devices, rule, remedy)
    rest = (devices or fixed) // fixed
    # A dcn parallelism of -1 is one slice.
    return {axis: (rest if ici == -1 else ici) * max(dcn, 1) for axis, (ici, dcn) in sizes.items()}
