"""Reads a MaxDiffusion YAML: its attention and mesh keys, in our words.

There one name says kernel and parallelism, and governs self- and cross-attention; here they are
three keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, get_args

from maxattn.config.document import read
from maxattn.config.errors import ConfigErrors, close, plain
from maxattn.config.fields import keys_of, section_type
from maxattn.config.load import (
    Config,
    Locations,
    check_path,
    in_file_order,
    validated,
)
from maxattn.config.maxdiffusion_keys import (
    BLOCK_SIZES,
    CUSTOM_SIZES,
    KERNELS,
    LENGTHS_MATTER,
    OF_ONE_ATTENTION,
    SAME,
    TAKEN,
    recognised,
    some_of,
)
from maxattn.config.overrides import Overrides, apply_overrides
from maxattn.config.rules import PROGRAM_SECTIONS, RematPolicy
from maxattn.config.section import Section
from maxattn.errors import ConfigError


class Imported(NamedTuple, Generic[Config]):
    """Hold what came of a MaxDiffusion file.

    Args:
        config: the settings.
        left_out: names of the keys that were not taken, dotted, in the order of the file.
        notes: what was read otherwise than it was written, and why.
    """

    config: Config
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


class Translated(NamedTuple):
    """Hold our keys, the names left out, and notes; nothing is validated yet."""

    values: dict[str, Any]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def load(
    model: type[Config], path: str | os.PathLike[str], overrides: Overrides
) -> Imported[Config]:
    """Read, translate, override and validate.

    Args:
        model: the config class.
        path: the file.
        overrides: `key=value` texts, or values by key, in our names.

    Raises:
        ConfigErrors: for a file that is ours already; with every problem of the keys that are
            taken.
    """
    check_path(path)
    source = os.fspath(path)
    document = read(source)
    if (ours := already_ours(model, document.data, source)) is not None:
        raise ConfigErrors([ours], source)
    values, left_out, notes = translate(model, document.data)
    taken = (*values, BLOCK_SIZES)
    origins, problems = apply_overrides(model, values, overrides)
    problems = [*(p for p in document.problems if p.setting.split(".")[0] in taken), *problems]
    config, wrong = validated(model, values, Locations(document, source, origins))
    if config is not None and not problems:
        return Imported(config, left_out, notes)
    raise ConfigErrors(sorted([*problems, *wrong], key=in_file_order), source)


def already_ours(model: type[Section], data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Say that a file of ours was read as one of MaxDiffusion; None of another file.

    Args:
        model: the config class.
        data: the file's values.
        source: the file.
    """
    only_ours = model.model_fields.keys() - set(TAKEN)
    sections = {key for key in PROGRAM_SECTIONS if isinstance(data.get(key), Mapping)}
    own = [key for key in data if key in only_ours | sections]
    if not own or recognised(data, source):
        return None
    rule = f"{some_of(own)}: keys of maxattn's own, and this reads a MaxDiffusion YAML"
    remedy = f"it needs no conversion: `maxattn check {source}`; in Python from_yaml(...)"
    return ConfigError(source, "a file of maxattn's own", rule, remedy)


def translate(model: type[Section], data: Mapping[str, Any]) -> Translated:
    """Translate a file's values."""
    sizes = keys_of(section_type(model.model_fields[BLOCK_SIZES]))
    values = {key: data[key] for key in SAME if data.get(key) is not None}
    values |= _attention(data) | _block_sizes(data, sizes) | _remat(data) | _hardware(values)
    return Translated(values, tuple(_left_out(data, values)), tuple(_notes(data, values, sizes)))


def _left_out(data: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    taken = {*TAKEN} - ({"remat_policy"} - values.keys())
    yield from (str(key) for key in data if key not in taken)
    given, kept = data.get(BLOCK_SIZES), values.get(BLOCK_SIZES) or {}
    if isinstance(given, Mapping):
        yield from (f"{BLOCK_SIZES}.{key}" for key in given if key not in kept)


# ---- values --------------------------------------------------------------------------------------


def _attention(data: Mapping[str, Any]) -> dict[str, Any]:
    """Split the one name into kernel, strategy and the kernel of cross-attention.

    A wrong name is left for the model to refuse.
    """
    name = data.get("attention")
    if name is None:
        return {}
    if not isinstance(name, str) or name not in KERNELS:
        return {"attention": name}
    kernel, strategy = KERNELS[name]
    if strategy == "auto":
        return {"attention": kernel, "cross_attention": kernel}
    inside = {} if kernel == "auto" else {"attention_kernel": kernel, "cross_attention": kernel}
    return {"attention": strategy, **inside}


def _block_sizes(data: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    given = data.get(BLOCK_SIZES)
    if not given:
        return {}
    if not isinstance(given, Mapping):
        return {BLOCK_SIZES: given}
    return {BLOCK_SIZES: {key: size for key, size in given.items() if key in known}}


def _remat(data: Mapping[str, Any]) -> dict[str, Any]:
    policy = data.get("remat_policy")
    return {"remat_policy": policy} if policy in get_args(RematPolicy) else {}


def _hardware(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read gpu_multiprocess as gpu: many processes are jax.distributed's matter here."""
    return {"hardware": "gpu"} if values.get("hardware") == "gpu_multiprocess" else {}


# ---- notes ---------------------------------------------------------------------------------------


def _notes(
    data: Mapping[str, Any], values: Mapping[str, Any], sizes: tuple[str, ...]
) -> Iterator[str]:
    """Say what was read otherwise than it was written."""
    yield from _note_on_name(data.get("attention"))
    yield from _note_on_gathered_keys(data)
    yield from _notes_on_other_kernels(data)
    yield from _notes_on_sizes(data.get(BLOCK_SIZES), sizes)
    yield from _note_on_remat(data.get("remat_policy"))
    if data.get("hardware") == "gpu_multiprocess":
        yield (
            "hardware: gpu_multiprocess is read as gpu; call jax.distributed.initialize() for many"
            " processes"
        )
    yield from _note_on_short(data.get("attention"), values.get("flash_min_seq_length"))


def _note_on_short(name: Any, least: Any) -> Iterator[str]:
    """Say where short queries or keys run dot_product there and not here."""
    if isinstance(least, int) and least > 0:
        yield (
            f"flash_min_seq_length: {least} looks at the queries alone here; there short keys run"
            " dot_product too"
        )
    elif least is None and name in LENGTHS_MATTER:
        yield (
            "flash_min_seq_length is not set: its models take 4096 then (Flux.2: 512), and shorter"
            f" queries or keys run dot_product there; here {KERNELS[name][0]} runs at every length"
        )


def _note_on_gathered_keys(data: Mapping[str, Any]) -> Iterator[str]:
    """Say that one name is other transfers here, where the sequence is spread."""
    name, spread = data.get("attention"), (f"{kind}_context_parallelism" for kind in ("ici", "dcn"))
    if name in ("flash", "tokamax_flash") and any(data.get(key, 1) != 1 for key in spread):
        yield (
            f"attention: {name} gathers keys and values over the context axis there (its Linen"
            " models, SD, SDXL and Flux.1, attend to each device's own alone); here"
            " context_parallel: auto chooses all_gather, ring or Ulysses, over the whole sequence"
        )


def _notes_on_other_kernels(data: Mapping[str, Any]) -> Iterator[str]:
    for key, what in OF_ONE_ATTENTION.items():
        if data.get(key) is not None:
            here = "give that module or call a config of its own"
            yield f"{key}: {plain(data[key])} is for {what} alone there, and left out; here {here}"


def _note_on_name(name: Any) -> Iterator[str]:
    if not isinstance(name, str) or name not in KERNELS:
        return
    kernel, strategy = KERNELS[name]
    if strategy != "auto":
        inside = f" with {kernel} inside, cross-attention by {kernel}" if kernel != "auto" else ""
        yield f"attention: {name} is read as {strategy}{inside}"
    if "custom" in name:
        yield (
            f"attention: {name} has a forward-only kernel of its own there; {kernel} computes the"
            " same, and its gradients"
        )


def _notes_on_sizes(given: Any, known: tuple[str, ...]) -> Iterator[str]:
    """Tell of sizes that only other kernels read, and of misspelt ones."""
    for key in given if isinstance(given, Mapping) else ():
        if key in CUSTOM_SIZES:
            yield f"{BLOCK_SIZES}.{key} is read by its custom kernels alone"
        elif key not in known:
            guess = close(str(key), known)
            hint = f": {guess}" if guess else ""
            yield f"{BLOCK_SIZES}.{key} is no key there either, and was ignored{hint}"


def _note_on_remat(policy: Any) -> Iterator[str]:
    ours = get_args(RematPolicy)
    if policy is not None and policy not in ours:
        yield f"remat_policy: {plain(policy)} is not one of ours: {', '.join(ours)}"
