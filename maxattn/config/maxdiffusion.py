"""Reads a MaxDiffusion YAML: its attention and mesh keys, in our words.

There one name says kernel and parallelism, and governs self- and cross-attention; here they are
three keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import ValidationError

from maxattn.config import overrides as config_overrides
from maxattn.config.errors import ConfigErrors, close, from_pydantic, plain
from maxattn.config.load import Places, check_path, in_file_order, read
from maxattn.config.overrides import Overrides
from maxattn.config.rules import PROGRAM_SECTIONS, RematPolicy
from maxattn.errors import ConfigError

if TYPE_CHECKING:
    from maxattn.config.settings import AttentionConfig


class Imported(NamedTuple):
    """Hold what came of a MaxDiffusion file.

    Args:
        config: the settings.
        left_out: names of the keys that were not taken, dotted, in the order of the file.
        notes: what was read otherwise than it was written, and why.
    """

    config: AttentionConfig
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


# Kernel names -> (kernel, strategy) here; "auto" leaves it open. "custom" and "fixed_m" are kernels
# of its own.
KERNELS: dict[str, tuple[str, str]] = {
    "dot_product": ("dot_product", "auto"),
    "flash": ("flash", "auto"),
    "tokamax_flash": ("tokamax_flash", "auto"),
    "cudnn_flash_te": ("cudnn_flash_te", "auto"),
    "ring": ("auto", "ring"),
    "tokamax_ring": ("tokamax_flash", "ring"),
    "tokamax_ring_custom": ("tokamax_flash", "ring"),
    "ulysses": ("flash", "ulysses"),
    "ulysses_custom": ("flash", "ulysses"),
    "ulysses_custom_fixed_m": ("flash", "ulysses"),
    "ulysses_ring": ("tokamax_flash", "ulysses_ring"),
    "ulysses_ring_custom": ("tokamax_flash", "ulysses_ring"),
    "ulysses_ring_custom_bidir": ("tokamax_flash", "ulysses_ring"),
    "ulysses_ring_custom_fixed_m": ("tokamax_flash", "ulysses_ring"),
}
SAME = (
    "flash_min_seq_length",
    "mask_padding_tokens",
    "use_base2_exp",
    "use_experimental_scheduler",
    "ulysses_shards",
    "ulysses_attention_chunks",
    "split_head_dim",
    "float32_qk_product",
    "use_memory_efficient_attention",
    "hardware",
    "attention_sharding_uniform",
    "mesh_axes",
    "ici_fsdp_batch_parallelism",
    "enable_jax_named_scopes",
    "enable_profiler",
    "profiler_steps",
    "skip_first_n_steps_for_profiler",
    *(
        f"{kind}_{axis}_parallelism"
        for kind in ("ici", "dcn")
        for axis in ("data", "fsdp", "context", "tensor")
    ),
)
# Keys of its files that no other has, and some that ours have in a section.
ITS_OWN = (
    "run_name",
    "base_output_directory",
    "pretrained_model_name_or_path",
    "model_name",
    "unet_checkpoint",
    "wan_transformer_pretrained_model_name_or_path",
    "activations_dtype",
    "jit_initializers",
    "from_pt",
    "replicate_vae",
    "logical_axis_rules",
    "data_sharding",
    "names_which_can_be_saved",
    "names_which_can_be_offloaded",
    "save_config_to_gcs",
    "gcs_metrics",
    "metrics_file",
    "jax_cache_dir",
    "skip_jax_distributed_system",
    "hf_data_dir",
    "dataset_save_location",
    "per_device_batch_size",
    "learning_rate_schedule_steps",
    "diffusion_scheduler_config",
    "use_qwix_quantization",
    "enable_tile_search",
    "allow_split_physical_axes",
)
ITS_OWN_OR_A_SECTION_S = (
    "model_type",
    "revision",
    "weights_dtype",
    "precision",
    "output_dir",
    "dataset_name",
    "learning_rate",
    "dataset_type",
    "max_train_steps",
    "seed",
    "prompt",
    "negative_prompt",
    "guidance_scale",
    "num_inference_steps",
    "dropout",
    "adam_b1",
    "adam_b2",
    "max_grad_norm",
    "height",
    "width",
    "num_frames",
    "fps",
    "quantization",
)
CUSTOM_SIZES = ("block_kv_compute_in", "heads_per_tile", "vmem_limit_bytes")
SECTION = "flash_block_sizes"


def recognised(data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Return what to say of a MaxDiffusion file that was read as one of ours, or None of another
    file.

    Args:
        data: the file's values.
        source: the file.
    """
    own = [key for key in ITS_OWN if key in data]
    sizes = data.get(SECTION)
    own += [
        f"{SECTION}.{key}" for key in CUSTOM_SIZES if isinstance(sizes, Mapping) and key in sizes
    ]
    both = [*own, *(key for key in ITS_OWN_OR_A_SECTION_S if key in data)]
    if not own or len(both) < 2:
        return None
    rule = (
        f"{', '.join(both[:4])}{', ...' if len(both) > 4 else ''}: keys of a MaxDiffusion YAML, and"
        " this reads ours"
    )
    remedy = (
        f"`maxattn convert {source} > attention.yml`, or `maxattn check --maxdiffusion {source}`"
    )
    return ConfigError(
        source, "a MaxDiffusion file", rule, f"{remedy}; in Python from_maxdiffusion(...)"
    )


def already_ours(data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Return what to say of a file of ours that was read as a MaxDiffusion file, or None of another
    file.

    Args:
        data: the file's values.
        source: the file.
    """
    from maxattn.config.settings import AttentionConfig

    only_ours = AttentionConfig.model_fields.keys() - {*SAME, "attention", "remat_policy", SECTION}
    own = [
        key
        for key in data
        if key in only_ours or (key in PROGRAM_SECTIONS and isinstance(data[key], Mapping))
    ]
    if not own or recognised(data, source):
        return None
    names = f"{', '.join(own[:4])}{', ...' if len(own) > 4 else ''}"
    rule = f"{names}: keys of maxattn's own, and this reads a MaxDiffusion YAML"
    remedy = f"it needs no conversion: `maxattn check {source}`; in Python from_yaml(...)"
    return ConfigError(source, "a file of maxattn's own", rule, remedy)


def load(
    model: type[AttentionConfig], path: str | os.PathLike[str], overrides: Overrides
) -> Imported:
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
    if (ours := already_ours(document.data, source)) is not None:
        raise ConfigErrors([ours], source)
    values, left_out, notes = translate(document.data)
    problems = [p for p in document.problems if p.setting.split(".")[0] in (*values, SECTION)]
    try:
        origins = config_overrides.apply(model, values, overrides)
    except config_overrides.PartlyApplied as error:
        problems, origins = [*problems, *error.problems], error.origins
    try:
        config = model.model_validate(values)
        if not problems:
            return Imported(config, left_out, notes)
    except ValidationError as error:
        problems += from_pydantic(model, values, error, Places(document, source, origins))
    raise ConfigErrors(sorted(problems, key=in_file_order), source) from None


def translate(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Return (our keys, names left out, notes) of a file's values; nothing is validated yet."""
    notes: list[str] = []
    values = {key: data[key] for key in SAME if data.get(key) is not None}
    values |= (
        _attention(data, notes)
        | _block_sizes(data, notes)
        | _remat(data, notes)
        | _hardware(values, notes)
    )
    if isinstance(least := values.get("flash_min_seq_length"), int) and least > 0:
        notes.append(
            f"flash_min_seq_length: {least} looks at the queries alone here; there short keys run"
            " dot_product too"
        )
    taken = {*SAME, "attention", "remat_policy", SECTION} - {
        key for key in ("remat_policy",) if key not in values
    }
    given = data.get(SECTION)
    kept = values.get(SECTION) or {}
    inner = (
        [f"{SECTION}.{key}" for key in given if key not in kept]
        if isinstance(given, Mapping)
        else []
    )
    return values, (*(str(key) for key in data if key not in taken), *inner), tuple(notes)


def _attention(data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Split the one name into kernel, strategy and cross-attention's kernel; a wrong name is left
    for the model.
    """
    name = data.get("attention")
    if name is None:
        return {}
    if not isinstance(name, str) or name not in KERNELS:
        return {"attention": name}
    kernel, strategy = KERNELS[name]
    _note_on_name(name, kernel, notes)
    if strategy == "auto":
        return {"attention": kernel, "cross_attention": kernel}
    inside = {} if kernel == "auto" else {"attention_kernel": kernel, "cross_attention": kernel}
    return {"attention": strategy, **inside}


def _note_on_name(name: str, kernel: str, notes: list[str]) -> None:
    strategy = KERNELS[name][1]
    if strategy != "auto":
        inside = f" with {kernel} inside, cross-attention by {kernel}" if kernel != "auto" else ""
        notes.append(f"attention: {name} is read as {strategy}{inside}")
    if "custom" in name:
        notes.append(
            f"attention: {name} has a forward-only kernel of its own there; {kernel} computes the"
            " same, and its gradients"
        )


def _block_sizes(data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Take the sizes that we have; tell of those that only other kernels read, and of misspelt
    ones.
    """
    from maxattn.config.settings import FlashBlockSizes

    given = data.get(SECTION)
    if not given:
        return {}
    if not isinstance(given, Mapping):
        return {SECTION: given}
    known = FlashBlockSizes.model_fields
    for key in given:
        if key in CUSTOM_SIZES:
            notes.append(f"{SECTION}.{key} is read by its custom kernels alone")
        elif key not in known:
            guess = close(str(key), known)
            notes.append(
                f"{SECTION}.{key} is no key there either, and was ignored"
                + (f": {guess}" if guess else "")
            )
    return {SECTION: {key: size for key, size in given.items() if key in known}}


def _remat(data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    policy = data.get("remat_policy")
    if policy is None:
        return {}
    if policy in get_args(RematPolicy):
        return {"remat_policy": policy}
    notes.append(
        f"remat_policy: {plain(policy)} is not one of ours: {', '.join(get_args(RematPolicy))}"
    )
    return {}


def _hardware(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Read gpu_multiprocess as gpu: many processes are jax.distributed's matter here."""
    if values.get("hardware") != "gpu_multiprocess":
        return {}
    notes.append(
        "hardware: gpu_multiprocess is read as gpu; call jax.distributed.initialize() for many"
        " processes"
    )
    return {"hardware": "gpu"}
