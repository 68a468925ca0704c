"""The names that a MaxDiffusion YAML uses, and how a file is told to be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxattn.config.rules import AXES
from maxattn.errors import ConfigError

# Kernel names -> (kernel, strategy) here; "auto" leaves it open. "custom" and "fixed_m" are kernels
# of its own.
KERNELS: dict[str, tuple[str, str]] = {
    "dot_product": ("dot_product", "auto"),
    "flash": ("flash", "auto"),
    "tokamax_flash": ("tokamax_flash", "auto"),
    "cudnn_flash_te": ("cudnn_flash_te", "auto"),
    "ring": ("auto", "ring"),
    "tokamax_ring": ("tokamax_flash", "ring"),
    "tokamax_ring_custom": ("tpu_flash", "ring"),
    "ulysses": ("flash", "ulysses"),
    "ulysses_custom": ("tpu_flash", "ulysses"),
    "ulysses_custom_fixed_m": ("tpu_flash", "ulysses"),
    "ulysses_ring": ("tokamax_flash", "ulysses_ring"),
    "ulysses_ring_custom": ("tpu_flash", "ulysses_ring"),
    "ulysses_ring_custom_bidir": ("tpu_flash", "ulysses_ring"),
    "ulysses_ring_custom_fixed_m": ("tpu_flash", "ulysses_ring"),
}
# Names under which its code takes dot_product for short queries or keys, at 4096 where no file says
# otherwise.
LENGTHS_MATTER = (
    "flash", "tokamax_flash", "ulysses", "ulysses_custom", "ulysses_custom_fixed_m", "ulysses_ring",
)  # fmt: skip
# Kernels of one attention among several of a model: ours has a config for each module instead.
OF_ONE_ATTENTION = {
    "a2v_attention_kernel": "attention of the video to the audio",
    "v2a_attention_kernel": "attention of the audio to the video",
    "text_encoder_attention": "the text encoder's attention",
}
_PARALLELISM = [f"{kind}_{axis}_parallelism" for kind in ("ici", "dcn") for axis in AXES]
SAME = (
    "flash_min_seq_length", "mask_padding_tokens", "use_base2_exp", "use_experimental_scheduler",
    "ulysses_shards", "ulysses_attention_chunks", "split_head_dim", "float32_qk_product",
    "use_memory_efficient_attention", "hardware", "attention_sharding_uniform", "mesh_axes",
    "ici_fsdp_batch_parallelism", "enable_jax_named_scopes", "enable_profiler", "profiler_steps",
    "skip_first_n_steps_for_profiler",
    *_PARALLELISM,
)  # fmt: skip
# Keys of its files that no other has, and some that ours have in a section.
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
TAKEN = (*SAME, "attention", "remat_policy", BLOCK_SIZES)


def recognised(data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Return the error of a MaxDiffusion file that is read as one of ours; None for another file.

    Args:
        data: the file's values.
        source: the file.
    """
    sizes = data.get(BLOCK_SIZES)
    given = sizes if isinstance(sizes, Mapping) else {}
    own = [key for key in ITS_OWN if key in data]
    own += [f"{BLOCK_SIZES}.{key}" for key in CUSTOM_SIZES if key in given]
    both = [*own, *(key for key in ITS_OWN_OR_A_SECTION_S if key in data)]
    if not own or len(both) < 2:
        return None
    rule = f"{some_of(both)}: keys of a MaxDiffusion YAML, and this reads ours"
    convert, check = f"`maxattn convert {source} > attention.yml`", "`maxattn check --maxdiffusion"
    remedy = f"{convert}, or {check} {source}`; in Python from_maxdiffusion(...)"
    return ConfigError(source, "a MaxDiffusion file", rule, remedy)


def some_of(names: list[str], most: int = 4) -> str:
    """List the first names, and tell whether there are more."""
    return f"{', '.join(names[:most])}{', ...' if len(names) > most else ''}"
