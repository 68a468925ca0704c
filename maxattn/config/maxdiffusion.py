"""Translates the attention and mesh keys of a MaxDiffusion YAML to maxattn's keys.

In MaxDiffusion, `attention` alone sets the kernel and parallelism of self- and cross-attention;
maxattn has three keys: `attention`, `attention_kernel` and `cross_attention`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, get_args

from maxattn.config.document import read
from maxattn.config.errors import ConfigErrors, keys_of, plain, refused
from maxattn.config.load import (
    Config,
    Locations,
    Overrides,
    apply_overrides,
    check_path,
    in_file_order,
    validated,
)
from maxattn.config.rules import FOREIGN, PROGRAM_SECTIONS, RematPolicy
from maxattn.config.section import Section
from maxattn.config.settings import AttentionConfig
from maxattn.errors import ConfigError, did_you_mean

# MaxDiffusion's `attention` -> our (kernel, strategy); "auto" leaves the choice open. Names with
# "custom" or "fixed_m" select kernels of MaxDiffusion's own.
KERNELS: dict[str, tuple[str, str]] = {
    **{
        name: (name, "auto") for name in ("dot_product", "flash", "tokamax_flash", "cudnn_flash_te")
    },
    "ring": ("auto", "ring"),
    "ulysses": ("flash", "ulysses"),
    "ulysses_ring": ("tokamax_flash", "ulysses_ring"),
    **FOREIGN,
}
# Names for which MaxDiffusion runs dot_product on short queries or keys, by default below 4096.
LENGTHS_MATTER = (
    "flash", "tokamax_flash", "ulysses", "ulysses_custom", "ulysses_custom_fixed_m", "ulysses_ring",
)  # fmt: skip
# Keys for one attention of a model; in maxattn, each module may have a config of its own.
OF_ONE_ATTENTION = {
    "a2v_attention_kernel": "attention from video queries to audio keys",
    "v2a_attention_kernel": "attention from audio queries to video keys",
    "text_encoder_attention": "the text encoder's attention",
}
# Keys that only MaxDiffusion's files have; then keys that our files may have in a section.
ITS_OWN = (
    "run_name", "base_output_directory", "pretrained_model_name_or_path", "model_name",
    "unet_checkpoint", "wan_transformer_pretrained_model_name_or_path", "activations_dtype",
    "jit_initializers", "from_pt", "replicate_vae", "logical_axis_rules", "data_sharding",
    "names_which_can_be_saved", "names_which_can_be_offloaded", "save_config_to_gcs", "gcs_metrics",
    "metrics_file", "jax_cache_dir", "skip_jax_distributed_system", "hf_data_dir",
    "dataset_save_location", "per_device_batch_size", "learning_rate_schedule_steps",
    "diffusion_scheduler_config", "use_qwix_quantization", "enable_tile_search",
    "allow_split_physical_axes",
)  # fmt: skip
ITS_OWN_OR_A_SECTION_S = (
    "model_type", "revision", "weights_dtype", "precision", "output_dir", "dataset_name",
    "learning_rate", "dataset_type", "max_train_steps", "seed", "prompt", "negative_prompt",
    "guidance_scale", "num_inference_steps", "dropout", "adam_b1", "adam_b2", "max_grad_norm",
    "height", "width", "num_frames", "fps", "quantization",
)  # fmt: skip
CUSTOM_SIZES = ("block_kv_compute_in", "heads_per_tile", "vmem_limit_bytes")
BLOCK_SIZES = "flash_block_sizes"
ONLY_OURS = (
    "attention_kernel", "cross_attention", "context_parallel", "query_chunk_size", "key_chunk_size",
    "ring_direction", "deterministic", "check_finite", "fallback",
)  # fmt: skip
TAKEN = tuple(key for key in AttentionConfig.model_fields if key not in ONLY_OURS)


class Imported(NamedTuple, Generic[Config]):
    """The config that a MaxDiffusion file describes.

    Args:
        config: the settings.
        left_out: dotted names of the keys that were not translated, in the order of the file.
        notes: each setting whose meaning or value differs from the file's, and why.
    """

    config: Config
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def load(
    model: type[Config], path: str | os.PathLike[str], overrides: Overrides
) -> Imported[Config]:
    """Read a MaxDiffusion file, translate its keys, apply overrides, and validate."""
    check_path(path)
    source = os.fspath(path)
    document = read(source)
    data = document.data
    _refuse_ours(model, data, source)
    sizes = keys_of(model, BLOCK_SIZES)
    values = _translated(data, sizes)
    left_out = tuple(_left_out(data, values))
    notes = tuple(_notes(data, values.get("flash_min_seq_length"), sizes))
    taken = (*values, BLOCK_SIZES)
    origins, problems = apply_overrides(model, values, overrides)
    problems = [*(p for p in document.problems if p.setting.split(".")[0] in taken), *problems]
    config, wrong = validated(model, values, Locations(document, source, origins))
    if config is not None and not problems:
        return Imported(config, left_out, notes)
    raise ConfigErrors(sorted([*problems, *wrong], key=in_file_order), source)


def _refuse_ours(model: type[Section], data: Mapping[str, Any], source: str) -> None:
    only_ours = model.model_fields.keys() - set(TAKEN)
    sections = {key for key in PROGRAM_SECTIONS if isinstance(data.get(key), Mapping)}
    own = [key for key in data if key in only_ours | sections]
    if own and not recognised(data, source):
        rule = f"the file must be a MaxDiffusion YAML, and it has maxattn's keys {_some(own)}"
        remedy = f"read it without conversion: `maxattn check {source}`, in Python from_yaml(...)"
        raise refused(source, "a maxattn config", rule, remedy)


def recognised(data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Return the error for a MaxDiffusion file that is read as a maxattn config, else None."""
    sizes = data.get(BLOCK_SIZES)
    given = sizes if isinstance(sizes, Mapping) else {}
    own = [key for key in ITS_OWN if key in data]
    own += [f"{BLOCK_SIZES}.{key}" for key in CUSTOM_SIZES if key in given]
    both = [*own, *(key for key in ITS_OWN_OR_A_SECTION_S if key in data)]
    if not own or len(both) < 2:
        return None
    rule = f"the file must be a maxattn config, and it has MaxDiffusion's keys {_some(both)}"
    convert, check = f"`maxattn convert {source} > attention.yml`", "`maxattn check --maxdiffusion"
    remedy = f"run {convert}, or {check} {source}`, or in Python from_maxdiffusion(...)"
    return ConfigError(source, "a MaxDiffusion file", rule, remedy)


def _some(names: list[str], most: int = 4) -> str:
    return f"{', '.join(names[:most])}{', ...' if len(names) > most else ''}"


def _translated(data: Mapping[str, Any], sizes: tuple[str, ...]) -> dict[str, Any]:
    """Return a file's values under maxattn's keys; validation refuses wrong values later."""
    same = (key for key in TAKEN if key not in ("attention", "remat_policy", BLOCK_SIZES))
    values = {key: data[key] for key in same if data.get(key) is not None}
    if (name := data.get("attention")) is not None:
        known = isinstance(name, str) and name in KERNELS
        kernel, strategy = KERNELS[name] if known else (name, "")
        values["attention"] = strategy if strategy not in ("", "auto") else kernel
        if strategy == "auto":
            values["cross_attention"] = kernel
        elif strategy and kernel != "auto":
            values |= {"attention_kernel": kernel, "cross_attention": kernel}
    if given := data.get(BLOCK_SIZES):
        is_section = isinstance(given, Mapping)
        kept = {k: size for k, size in given.items() if k in sizes} if is_section else given
        values[BLOCK_SIZES] = kept
    if (policy := data.get("remat_policy")) in get_args(RematPolicy):
        values["remat_policy"] = policy
    if values.get("hardware") == "gpu_multiprocess":  # the user starts the processes
        values["hardware"] = "gpu"
    return values


def _left_out(data: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    taken = {*TAKEN} - ({"remat_policy"} - values.keys())
    yield from (str(key) for key in data if key not in taken)
    given, kept = data.get(BLOCK_SIZES), values.get(BLOCK_SIZES) or {}
    if isinstance(given, Mapping):
        yield from (f"{BLOCK_SIZES}.{key}" for key in given if key not in kept)


# ---- notes ---------------------------------------------------------------------------------------


def _notes(data: Mapping[str, Any], least: Any, sizes: tuple[str, ...]) -> Iterator[str]:
    """Yield a note for each setting whose meaning or value differs from the file's."""
    name = data.get("attention")
    name = name if isinstance(name, str) and name in KERNELS else ""
    kernel, strategy = KERNELS.get(name, ("", "auto"))
    if strategy != "auto":
        inside = f" with {kernel} inside; cross_attention is {kernel}" if kernel != "auto" else ""
        yield f"attention: {name} is read as {strategy}{inside}"
    if "custom" in name:
        note = "runs a forward-only kernel in MaxDiffusion; in maxattn"
        yield f"attention: {name} {note} {kernel} computes the same result, and its gradients"
    spread = (data.get(f"{kind}_context_parallelism", 1) != 1 for kind in ("ici", "dcn"))
    if name in ("flash", "tokamax_flash") and any(spread):
        yield (
            f"attention: {name} gathers keys and values over the context axis in MaxDiffusion (its"
            " Linen models, SD, SDXL and Flux.1, attend only to keys of the same device); in"
            " maxattn context_parallel: auto chooses all_gather, ring or Ulysses, over all keys"
        )
    for key, what in OF_ONE_ATTENTION.items():
        if data.get(key) is not None:
            remedy = "pass a separate config to that module or call"
            yield f"{key}: {plain(data[key])} is only for {what} and is left out; {remedy}"
    yield from _notes_on_sizes(data.get(BLOCK_SIZES), sizes)
    policy, ours = data.get("remat_policy"), get_args(RematPolicy)
    if policy is not None and policy not in ours:
        yield f"remat_policy: {plain(policy)} is left out; it is not one of {', '.join(ours)}"
    if data.get("hardware") == "gpu_multiprocess":
        several = "for several processes, call jax.distributed.initialize()"
        yield f"hardware: gpu_multiprocess is read as gpu; {several}"
    if isinstance(least, int) and least > 0:
        theirs = "MaxDiffusion also runs dot_product if only the key length is below it"
        yield f"flash_min_seq_length: {least} is compared with the query length only; {theirs}"
    elif least is None and name in LENGTHS_MATTER:
        yield (
            "flash_min_seq_length is not set: MaxDiffusion then uses 4096 (Flux.2: 512), and runs"
            f" dot_product for shorter queries or keys; in maxattn {kernel} runs at every length"
        )


def _notes_on_sizes(given: Any, known: tuple[str, ...]) -> Iterator[str]:
    for key in given if isinstance(given, Mapping) else ():
        if key in CUSTOM_SIZES:
            yield f"{BLOCK_SIZES}.{key} is left out; only MaxDiffusion's custom kernels use it"
        elif key not in known:
            guess = did_you_mean(str(key), known)
            hint = f"; {guess}" if guess else ""
            yield f"{BLOCK_SIZES}.{key} is left out; neither project has this key{hint}"
