"""Tables of the names that files have for layers: those of published models, and a user's own.

A table maps a pattern of the file's name to the module's layer, or to several layers whose rows the
file's tensor has in sequence. A `*` is a number, and the numbers are the same on both sides:

    {"layers.*.attention.out": "layers.*.attention.to_out.0",
     "layers.*.attention.qkv": ["layers.*.attention.to_q", "layers.*.attention.to_k", ...]}

Sources: Flux.1, https://github.com/black-forest-labs/flux, and its LoRA by XLabs,
https://github.com/XLabs-AI/x-flux; Z-Image, https://github.com/Tongyi-MAI/Z-Image; LTX-2,
https://github.com/Lightricks/LTX-2. The names in Qwen-Image's own code are those of diffusers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from maxattn.config.document import read
from maxattn.config.errors import ConfigErrors, show
from maxattn.errors import WeightsError, did_you_mean

Table = Mapping[str, str | tuple[str, ...]]
_EXAMPLE = '{"blocks.*.attn.query": "blocks.*.attn.to_q"}'


def written_names(table: Table, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Map the file's names to the module's layers, in the order of their rows.

    >>> table = {"b.*.qkv": ("blocks.*.to_q", "blocks.*.to_k"), "c": "d"}
    >>> written_names(table, {"blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q"})
    {'b.0.qkv': ('blocks.0.to_q', 'blocks.0.to_k')}
    """
    alike: dict[str, list[str]] = {}
    for layer in layers:
        alike.setdefault(_without_numbers(layer), []).append(layer)
    found: dict[str, tuple[str, ...]] = {}
    for pattern, meant in table.items():
        parts = (meant,) if isinstance(meant, str) else meant
        form = re.compile(re.escape(parts[0]).replace(r"\*", r"(\d+)"))
        for layer in alike.get(_without_numbers(parts[0]), ()):
            if match := form.fullmatch(layer):
                those = tuple(_filled(part, match.groups()) for part in parts)
                if all(one in layers for one in those):
                    found[_filled(pattern, match.groups())] = those
    return found


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+|\*", "#", name)


def _filled(pattern: str, numbers: tuple[str, ...]) -> str:
    begin, *rest = pattern.split("*")
    return begin + "".join(n + part for n, part in zip(numbers, rest, strict=True))


# ---- a user's table ------------------------------------------------------------------------------


def checked_table(table: Any, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of a user's table, a mapping or the path of a YAML file, if it fits."""
    found: dict[str, tuple[str, ...]] = {}
    for pattern, value in _mapping(table).items():
        parts = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not (parts and all(isinstance(x, str) and x for x in (pattern, *parts))):
            rule = "an entry must map a name in the file to a layer's name, or to a list of names"
            raise WeightsError("names", _shown(pattern, value), rule, f"write {_EXAMPLE}")
        if any(part.count("*") != pattern.count("*") for part in parts):
            rule = "both sides must have the same number of *, each of which is a number"
            raise WeightsError("names", _shown(pattern, value), rule, f"write {_EXAMPLE}")
        names = written_names({pattern: parts}, layers)
        if not names:
            lacking = next((p for p in parts if not written_names({p: p}, layers)), parts[0])
            rule = f"the module must have the layer, and it has no {lacking}"
            forms = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer) for layer in layers}
            close = did_you_mean(lacking, {*forms, *layers}) or "write a name of entries(module)"
            raise WeightsError("names", _shown(pattern, value), rule, close)
        for name, meant in names.items():
            other = found.get(name, (name,) if name in layers else meant)
            if other != meant:
                also = " + ".join(other) if name in found else "the name of another layer"
                rule = f"a name must be of one layer, and {name} is also {also}"
                raise WeightsError(
                    "names", _shown(pattern, value), rule, "remove one of the entries"
                    if name in found else "remove the entry, or write another pattern",
                )  # fmt: skip
        found |= names
    return found


def check_used(names: Collection[str], written: Collection[str], prefix: str) -> None:
    """Refuse a user's table of which a file uses no name."""
    flat = {name.replace(".", "_") for name in names}
    if names and not any(layer in names or layer in flat for layer in written):
        example = next(iter(written), "")
        rule = f"the file must have a layer of the table, and it has none with prefix {prefix!r}"
        remedy = f'write the file\'s names without that prefix, such as "{example}"'
        raise WeightsError("names", f"{next(iter(names))}, for example", rule, remedy)


def _mapping(table: Any) -> Mapping[Any, Any]:
    if isinstance(table, str | os.PathLike):
        try:
            document = read(str(table))
            if document.problems:
                raise ConfigErrors(document.problems)
        except ConfigErrors as error:
            found = f"{error.where or table}: {error.value}"
            raise WeightsError("names", found, error.rule, error.remedy) from error
        table = document.data
    if not isinstance(table, Mapping):
        rule = "it must be a mapping of names in the file to layers of the module, or a YAML file"
        raise WeightsError("names", type(table).__name__, rule, f"pass {_EXAMPLE}")
    if not table:
        raise WeightsError("names", "{}", "it must have an entry", f"pass {_EXAMPLE}, or None")
    return table


def _shown(pattern: Any, value: Any) -> str:
    return f"{show(pattern)}: {show(value)}"[:200]


# ---- published models ----------------------------------------------------------------------------


def _qkv(file: str, layer: str, ends: tuple[str, ...] = ("to_q", "to_k", "to_v")) -> Table:
    return {file: tuple(f"{layer}.{end}" for end in ends)}


def _flux() -> dict[str, str | tuple[str, ...]]:
    """Return the names of Flux.1's own code, and of XLabs' LoRA of its attention."""
    file, ours = "double_blocks.*", "transformer_blocks.*"
    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    table: dict[str, str | tuple[str, ...]] = {}
    streams = (("img", "norm1", "ff", "1"), ("txt", "norm1_context", "ff_context", "2"))
    for stream, norm, ff, number in streams:
        ends = ("to_q", "to_k", "to_v") if stream == "img" else added
        out = f"{ours}.attn.{'to_out.0' if stream == 'img' else 'to_add_out'}"
        for name in (f"{stream}_attn.qkv", f"processor.qkv_lora{number}"):
            table |= _qkv(f"{file}.{name}", f"{ours}.attn", ends)
        table |= {
            f"{file}.{x}": out for x in (f"{stream}_attn.proj", f"processor.proj_lora{number}")
        }
        table[f"{file}.{stream}_mod.lin"] = f"{ours}.{norm}.linear"
        table[f"{file}.{stream}_mlp.0"] = f"{ours}.{ff}.net.0.proj"
        table[f"{file}.{stream}_mlp.2"] = f"{ours}.{ff}.net.2"
    file, ours = "single_blocks.*", "single_transformer_blocks.*"
    qkv = tuple(f"{ours}.attn.{end}" for end in ("to_q", "to_k", "to_v"))
    table |= {f"{file}.linear1": (*qkv, f"{ours}.proj_mlp"), f"{file}.processor.qkv_lora": qkv}
    table |= {f"{file}.{name}": f"{ours}.proj_out" for name in ("linear2", "processor.proj_lora")}
    table[f"{file}.modulation.lin"] = f"{ours}.norm.linear"
    embedders = {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}
    for name, embedder in embedders.items():
        for end, linear in (("in_layer", "linear_1"), ("out_layer", "linear_2")):
            table[f"{name}.{end}"] = f"time_text_embed.{embedder}_embedder.{linear}"
    outside = {"img_in": "x_embedder", "txt_in": "context_embedder"}
    return table | outside | {"final_layer.linear": "proj_out"}


def _z_image() -> dict[str, str | tuple[str, ...]]:
    """Return the names of Z-Image's files by its authors, which ComfyUI and its trainers write."""
    last = "all_final_layer.2-1"
    table: dict[str, str | tuple[str, ...]] = {"x_embedder": "all_x_embedder.2-1"}
    table |= {f"final_layer.{x}": f"{last}.{x}" for x in ("linear", "adaLN_modulation.1")}
    for blocks in ("layers.*", "noise_refiner.*", "context_refiner.*"):
        at = f"{blocks}.attention"
        table |= _qkv(f"{at}.qkv", at)
        ends = {"out": "to_out.0", "q_norm": "norm_q", "k_norm": "norm_k"}
        table |= {f"{at}.{theirs}": f"{at}.{ours}" for theirs, ours in ends.items()}
    return table


def _ltx2() -> dict[str, str | tuple[str, ...]]:
    adaptive = {
        "adaln_single": "time_embed",
        "audio_adaln_single": "audio_time_embed",
        "prompt_adaln_single": "prompt_adaln",
        "audio_prompt_adaln_single": "audio_prompt_adaln",
        "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
        "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
        "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
        "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    }
    inside = ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
    table: dict[str, str | tuple[str, ...]] = {
        f"{theirs}.{end}": f"{ours}.{end}" for theirs, ours in adaptive.items() for end in inside
    }
    table |= {f"{x}patchify_proj": f"{x}proj_in" for x in ("", "audio_")}
    attentions = ("attn1", "attn2", "audio_attn1", "audio_attn2")
    for kind in (*attentions, "audio_to_video_attn", "video_to_audio_attn"):
        at = f"transformer_blocks.*.{kind}"
        table |= {f"{at}.q_norm": f"{at}.norm_q", f"{at}.k_norm": f"{at}.norm_k"}
    for stream in ("video", "audio"):
        ours = f"transformer_blocks.*.{stream}_a2v_cross_attn_scale_shift_table"
        table[f"transformer_blocks.*.scale_shift_table_a2v_ca_{stream}"] = ours
    return table


FLUX_SWAPPED: Final = {"final_layer.adaLN_modulation.1": "norm_out.linear"}
"""A layer of Flux.1's own code with its shift before its scale, which diffusers has behind it."""
PUBLISHED: Final[dict[str, Table]] = {"flux": _flux(), "z_image": _z_image(), "ltx2": _ltx2()}
"""Tables by family; Wan's and Stability's names are in `layer_names`."""
