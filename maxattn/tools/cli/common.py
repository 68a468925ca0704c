"""What the commands share: reading the config with its overrides, shapes, a mesh of sizes, a
target.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from maxattn.config import AttentionConfig, load
from maxattn.config import overrides as config_overrides
from maxattn.errors import ConfigError, InputError, MeshError, did_you_mean
from maxattn.kernels.table import EXTRAS
from maxattn.target import Target
from maxattn.tools import model_shapes
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.model_shapes import Shape


@dataclass(frozen=True)
class Source:
    """Hold what a user gave as CONFIG and key=value.

    Args:
        config: the settings of attention.
        sections: the file's values with its program's sections, overrides applied.
        path: the file, or empty for overrides alone.
        overrides: the `key=value` texts.
        notes: what was read otherwise than it was written.
    """

    config: AttentionConfig
    sections: dict[str, Any]
    path: str
    overrides: tuple[str, ...]
    notes: tuple[str, ...] = ()


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides."""
    parser.add_argument(
        "config",
        nargs="?",
        default="",
        metavar="CONFIG",
        help="a YAML file, such as configs/wan_14b.yml",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="attention=ring ici_context_parallelism=4 ...",
    )


def read_source(args: argparse.Namespace) -> Source:
    """Read the config; a CONFIG with a = in it is an override of the defaults.

    Raises:
        ConfigErrors: for everything wrong in file and overrides.
    """
    path, overrides = args.config, list(args.overrides)
    if getattr(args, "maxdiffusion", False):
        config, left_out, notes = AttentionConfig.from_maxdiffusion(path, overrides)
        names = (f"left out: {', '.join(left_out)}",) if left_out else ()
        return Source(config, {}, path, tuple(overrides), (*notes, *names))
    if not path or ("=" in path and not Path(path).exists()):
        overrides = [text for text in (path, *overrides) if text]
        return Source(AttentionConfig.from_overrides(overrides), {}, "", tuple(overrides))
    config = AttentionConfig.from_yaml(path, overrides)
    sections = dict(load.read(path).data)
    config_overrides.apply(AttentionConfig, sections, overrides)
    return Source(config, sections, path, tuple(overrides))


# ---- shapes --------------------------------------------------------------------------------------


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is computed."""
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME|B,T,S,N,H[,K]",
        help="may stand several times; default the shapes of the file's model; names: "
        + ", ".join(model_shapes.SHAPES),
    )
    parser.add_argument(
        "--role", choices=("self", "cross"), help="default self where T = S, else cross"
    )
    parser.add_argument("--dtype", help="of q, k and v: bf16 (default), f16 or f32")
    parser.add_argument("--batch", type=int, help="B in place of the shape's")
    parser.add_argument(
        "--mask",
        help=(
            "full, causal, window:LEFT,RIGHT, block-window:BLOCK,WINDOW, block-causal:N, "
            "video:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]], joined by + (and)"
        ),
    )


def shapes_of(args: argparse.Namespace, source: Source) -> tuple[Shape, ...]:
    """Return the shapes that the options name, else those of the file's sections.

    Raises:
        InputError: for a wrong spelling, or when there is none.
    """
    found = [model_shapes.read(text) for text in args.shape] or list(
        model_shapes.of_sections(source.sections)
    )
    if not found:
        raise InputError(
            "shape",
            "(none)",
            "a plan is made for a shape, and the file's `model` section describes none",
            f"add --shape B,T,S,N,H, or --shape with one of {', '.join(model_shapes.SHAPES)}",
        )
    if args.batch is not None and args.batch < 1:
        raise InputError("batch", args.batch, "B is at least 1", "write --batch 1")
    mask = None if args.mask is None else read_mask(args.mask)
    return tuple(
        _fitting(model_shapes.changed(shape, args.role, args.dtype, mask, args.batch))
        for shape in found
    )


def _fitting(shape: Shape) -> Shape:
    """Return a shape that its mask fits.

    Raises:
        InputError: with what can be written here, where the library would have an argument given.
    """
    try:
        shape.call()
    except InputError as error:
        if "offset" not in error.remedy:
            raise
        remedy = f"leave --mask out for {shape.name}, or give a shape of no more queries than keys"
        raise InputError("--mask", error.value, error.rule, remedy) from None
    return shape


# ---- mesh and target -----------------------------------------------------------------------------


def machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the machine that plans are for."""
    parser.add_argument("--target", help='"TPU v5p", "NVIDIA H200", cpu, ...; default this machine')
    known = ", ".join(f"{name}={version}" for name, (_, version) in EXTRAS.items())
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="packages",
        metavar="PACKAGE[=VERSION]",
        help=f"an optional package that the named target has: {known}",
    )
    parser.add_argument(
        "--mesh",
        action="append",
        default=[],
        help="context=4,fsdp=2; default the parallelisms of the config",
    )
    parser.add_argument(
        "--devices", type=int, help="how many there are, for an ici_*_parallelism of -1"
    )


def target_of(args: argparse.Namespace, config: AttentionConfig) -> Target:
    """Return the named target, else the config's platform, else this machine. A name touches no
    backend.
    """
    packages = packages_of(args)
    if not args.target:
        from maxattn.decide import default_target

        return default_target(config)
    return Target.named(args.target, packages)


def packages_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return what --with lists as (package, version), "?" for a version that is not written.

    Raises:
        ConfigError: for packages without a target that is named.
        InputError: for a package that no kernel calls.
    """
    if not args.target and args.packages:
        rule = "packages are listed for a target that is named; this machine's are looked up"
        raise ConfigError("--with", " ".join(args.packages), rule, 'add --target "TPU v5p"')
    return tuple(_package(text) for text in args.packages)


def _package(text: str) -> tuple[str, str]:
    name, _, version = text.replace("==", "=").partition("=")
    if name not in EXTRAS:
        rule = f"the packages that kernels can call are {', '.join(EXTRAS)}"
        raise InputError(
            "--with", text, rule, did_you_mean(name, EXTRAS) or "name one of them, or leave it out"
        )
    return name, version or "?"


def mesh_of(args: argparse.Namespace, config: AttentionConfig) -> dict[str, int]:
    """Return the axis sizes that --mesh names, else those of the config; -1 is what --devices
    leaves, else 1.

    Raises:
        MeshError: for a wrong spelling, no device, or devices that do not divide or are not those
        of --mesh.
    """
    devices = args.devices
    if devices is not None and devices < 1:
        raise MeshError(
            "--devices", devices, "there is at least one device", "write --devices 1 or more"
        )
    if not args.mesh:
        return _mesh_of_config(config, devices)
    sizes = read_mesh(args.mesh)
    if devices is not None and prod(sizes.values()) != devices:
        rule = f"--mesh {','.join(args.mesh)} says how many there are, {prod(sizes.values())}"
        raise MeshError(
            "--devices",
            devices,
            rule,
            "leave one of them out: --devices is for the config's own mesh",
        )
    return sizes


def read_mesh(words: Sequence[str]) -> dict[str, int]:
    """Read axes: `context=4,fsdp=2`, in one word or several.

    Raises:
        MeshError: for a wrong spelling, or an axis that is named twice.
    """
    sizes: dict[str, int] = {}
    for part in ",".join(words).replace(" ", ",").split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not part:
            continue
        if not equals or not size.isdecimal():
            raise MeshError(
                "mesh", part, "it is axis=size, joined by commas", "write --mesh context=4,fsdp=2"
            )
        if axis in sizes:
            raise MeshError(
                "mesh",
                part,
                f"the axis {axis} is named twice",
                f"leave {axis}={sizes[axis]} or {part} out",
            )
        sizes[axis] = int(size)
    return sizes


def _mesh_of_config(config: AttentionConfig, devices: int | None) -> dict[str, int]:
    sizes = {axis: list(pair) for axis, pair in config.axis_parallelism().items()}
    fixed = prod(n for pair in sizes.values() for n in pair if n > 0)
    if devices is not None and devices % fixed:
        raise MeshError(
            "devices",
            devices,
            f"the config's parallelisms multiply to {fixed}, which must divide the devices",
            f"write --devices {max(1, devices // fixed) * fixed}, or change an ici_*_parallelism",
        )
    rest = (devices or fixed) // fixed
    open_axes = [axis for axis, (ici, _) in sizes.items() if ici == -1]
    if devices is not None and rest > 1 and not open_axes:
        raise MeshError(
            "devices",
            devices,
            f"the config's parallelisms multiply to {fixed}, and no ici_*_parallelism is -1",
            f"write --devices {fixed}, or set one ici_*_parallelism to -1",
        )
    # Slices: an open dcn axis is one slice here.
    return {axis: (rest if ici == -1 else ici) * max(dcn, 1) for axis, (ici, dcn) in sizes.items()}


def joined(blocks: Sequence[str]) -> str:
    """Put a blank line between blocks of text."""
    return "\n\n".join(block for block in blocks if block)
