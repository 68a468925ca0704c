"""Answers arguments that a function does not have: names of flax, jax, torch and diffusers.

A decorated function refuses them all at once, each with maxattn's own name or with what to write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from maxattn.config.settings import AttentionConfig
from maxattn.errors import InputError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])

# Our name -> names that other libraries have for it. A function's own names go first.
RENAMED = {
    "query_dim": "in_features embed_dim hidden_size features dim channels model_dim d_model",
    "heads": "num_heads n_heads num_attention_heads nhead num_query_heads",
    "kv_heads": "num_kv_heads n_kv_heads num_key_value_heads",
    "dim_head": "head_dim attention_head_dim dim_heads head_size",
    "out_dim": "out_features output_dim",
    "cross_attention_dim": "context_dim kv_dim kdim in_kv_features encoder_hidden_size",
    "dropout": "dropout_rate dropout_p attn_drop attention_dropout",
    "bias": "qkv_bias attn_bias attention_bias", "out_bias": "use_bias",
    "eps": "epsilon norm_eps",
    "qk_norm": "normalize_qk qk_normalization",
    "param_dtype": "weights_dtype weight_dtype params_dtype",
    "gate": "gated gating",
    "mask": "attention_mask attn_mask key_padding_mask padding_mask encoder_attention_mask",
    "rotary_emb": "image_rotary_emb freqs_cis freqs rope rotary rotary_embedding pos_emb",
    "hidden_states": "inputs_q inputs x q query",
    "encoder_hidden_states": "inputs_k inputs_kv inputs_v context kv key value encoder_states"
                             " text",
    "text": "encoder_hidden_states hidden_states context x",
    "rngs": "dropout_rng rng dropout_key",
    "q": "query", "k": "key", "v": "value", "query": "q", "key": "k", "value": "v",
    "scale": "sm_scale softmax_scale qk_scale",
    "return_lse": "return_residual return_logsumexp return_softmax_lse return_attn_probs",
    "deterministic": "train training is_training eval",
}  # fmt: skip
WITHOUT = "leave it out"
NO_DROPOUT = f"{WITHOUT}, as no probability is dropped: drop the output with nnx.Dropout"
KERNEL = "name the kernel in the config, as in config=ma.AttentionConfig(attention='flash')"
PROBABILITIES = f"{WITHOUT}, as no kernel makes the probabilities; attention_fn sows them for flax"
MODE = f"{WITHOUT}: only modules drop, by train(), eval() or deterministic in their call"
CROSS = "use ma.CrossAttention for keys of another sequence, ma.JointAttention if both attend"
NORM = f"{WITHOUT}, and normalise what the call gets, as with nnx.GroupNorm or nnx.LayerNorm"
# What to write if it is more than the name of one argument.
WRITTEN = {"use_bias": "bias= and out_bias=", "normalize_qk": "qk_norm='layer_norm'"}
NOT_HERE = (
    "keep this layer's own attention: maxattn does not have it, and results differ without it"
)
SEGMENTS = "pass mask=ma.masks.Segments(q_ids, kv_ids)"
# The names of others that are no argument of ours -> what to write.
ADVICE = {
    "is_causal": "pass mask=ma.masks.Causal(0), in which query i sees the keys 0 to i",
    "causal": "pass mask=ma.masks.Causal(), in which the last query sees every key",
    "key_value_seq_lengths": "pass mask=ma.masks.KeyPadding(lengths)",
    "query_seq_lengths": f"{WITHOUT}, and ignore the output of queries that are padding",
    "local_window_size": "pass mask=ma.masks.LocalWindow(left, right, 0)",
    "window_size": "pass mask=ma.masks.LocalWindow(left, right)",
    "segment_ids": SEGMENTS, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS,
    "implementation": KERNEL, "attention_kernel": KERNEL, "attention": KERNEL,
    "attention_fn": KERNEL, "processor": KERNEL, "block_sizes": f"{KERNEL}, and flash_block_sizes",
    "enable_gqa": f"{WITHOUT}: there may be fewer key heads than query heads",
    "qkv_features": "set heads and dim_head, whose product it is",
    "dropout": NO_DROPOUT, "dropout_rate": NO_DROPOUT, "dropout_p": NO_DROPOUT,
    "dropout_rng": NO_DROPOUT, "broadcast_dropout": NO_DROPOUT,
    "deterministic": MODE, "train": MODE, "training": MODE,
    "decode": "make a cache with ma.KVCache.empty, and pass cache=cache.layer(i) in the call",
    "sow_weights": PROBABILITIES, "need_weights": PROBABILITIES, "module": PROBABILITIES,
    "output_attentions": PROBABILITIES,
    "encoder_hidden_states": CROSS, "inputs_k": CROSS, "inputs_kv": CROSS, "inputs_v": CROSS,
    "context": CROSS, "key": CROSS, "value": CROSS, "cross_attention_dim": CROSS,
    "added_kv_proj_dim": CROSS, "only_cross_attention": CROSS,
    "pre_only": "pass out_proj=False",
    "context_pre_only": "pass text_out=False to ma.JointAttention",
    "upcast_attention": "set float32_qk_product=True in the config",
    "upcast_softmax": f"{WITHOUT}: every kernel has its softmax in float32",
    "residual_connection": f"{WITHOUT}, and add the input to the output",
    "rescale_output_factor": f"{WITHOUT}, and divide the output by it",
    "norm_num_groups": NORM, "spatial_norm_dim": NORM, "cross_attention_norm": NORM,
    **dict.fromkeys((
        "attn_logits_soft_cap", "attn_logit_softcapping", "logits_soft_cap", "logit_cap", "softcap",
        "soft_cap", "sinks", "attention_sinks", "softmax_aux", "s_aux", "head_mask",
    ), NOT_HERE),
    "alibi_slopes": "pass bias=-slopes[:, None, None] * abs(i - j), for query i and key j",
    "rotary_emb": "rotate q and k before the call with ma.apply_rotary",
    "image_rotary_emb": "rotate q and k before the call with ma.apply_rotary",
}  # fmt: skip
_OURS = {theirs: [o for o in RENAMED if theirs in RENAMED[o].split()]
         for names in RENAMED.values() for theirs in names.split()}  # fmt: skip
_OPPOSITE = {"train", "training", "is_training"}  # of `deterministic`


class ArgumentError(InputError, TypeError):
    """A call has arguments that the function does not have."""


def answers_names(function: Function) -> Function:
    """Decorate a function so that it answers unknown arguments in maxattn's words."""
    known = tuple(name for name in signature(function).parameters if name != "self")
    names = frozenset(known)
    owner, _, own = function.__qualname__.rpartition(".")
    title = owner if own == "__init__" else f"a call of {owner}" if own == "__call__" else own

    first_named = known.index("kv_heads") if own == "__init__" and "kv_heads" in names else None

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        if first_named is not None and len(args) - 1 > first_named:
            passed = ", ".join(f"{name}=" for name in known[first_named : len(args) - 1])
            why = f"{title}: pass {passed} by name, since other libraries have dim_head there"
            warnings.warn(why, DeprecationWarning, stacklevel=5)  # the line behind frames of nnx
        if not given.keys() <= names:
            raise _refused(title, known, [name for name in given if name not in names])
        return function(*args, **given)

    return cast(Function, checked)


def _refused(title: str, known: tuple[str, ...], unknown: list[str]) -> ArgumentError:
    rule = f"{title} has the arguments {', '.join(known)}"
    answers: dict[str, list[str]] = {}
    for name in unknown:
        answers.setdefault(_answer(name, known), []).append(name)
    each = (f"{', '.join(names)}: {it}" for it, names in answers.items())
    remedy = "; ".join(answers if len(answers) == 1 else each)
    return ArgumentError(", ".join(unknown), "unknown argument", rule, remedy)


def _answer(name: str, known: Iterable[str]) -> str:
    for ours in _OURS.get(name, ()):
        if ours in known:
            value = f"not {name}" if name in _OPPOSITE else ""
            return f"write {WRITTEN.get(name, f'{ours}={value}')}"
    if advice := ADVICE.get(name):
        return advice
    if name in AttentionConfig.model_fields:
        return f"set it in the config: ma.AttentionConfig({name}=...)"
    unknown = f"{WITHOUT} if no result depends on it, or use one of these"
    return did_you_mean(name, known) or unknown
