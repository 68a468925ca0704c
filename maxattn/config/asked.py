"""The kernel, strategy and fallback that a config requests for self- or cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from maxattn.config.errors import plain
from maxattn.config.rules import Role, attentions
from maxattn.config.settings import AttentionConfig
from maxattn.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """The requested kernel, strategy and fallback, with the keys that set them, and as `text`."""

    kernel: str
    kernel_key: str
    strategy: str
    strategy_key: str
    fallback: str
    text: str

    @staticmethod
    @lru_cache(maxsize=256)
    def of(config: AttentionConfig, role: Role) -> Asked:
        """Return what a config requests for the role "self" or "cross"; results are cached."""
        kernel, strategy = config.kernel_for(role), config.strategy_for(role)
        fallback = config.fallback_for(role)
        if role == "cross":
            key, text = "cross_attention", f"cross_attention: {config.cross_attention}"
            return Asked(kernel, key, strategy, key, fallback, text)
        keys = ("attention_kernel", "context_parallel", "attention_sharding_uniform")
        shown = ("attention", *(key for key in keys if key in config.changed))
        text = ", ".join(f"{key}: {plain(getattr(config, key))}" for key in shown)
        kernel_key = "attention_kernel" if config.attention_kernel == kernel else "attention"
        strategy_key = "context_parallel" if config.context_parallel == strategy else "attention"
        return Asked(kernel, kernel_key, strategy, strategy_key, fallback, text)


def checked_config(config: AttentionConfig | None) -> AttentionConfig:
    """Return the config, or the default config for None; refuse objects of other types."""
    if config is None:
        return AttentionConfig()
    if isinstance(config, AttentionConfig):
        return config
    makers = "AttentionConfig(...), AttentionConfig.from_yaml or AttentionConfig.from_overrides"
    rule, remedy = "it must be an AttentionConfig", f"make one with {makers}"
    if isinstance(config, Mapping):
        remedy = "pass AttentionConfig(**config)"
    elif isinstance(config, str | Path) and Path(config).suffix in (".yml", ".yaml"):
        remedy = f"pass AttentionConfig.from_yaml({str(config)!r})"
    elif isinstance(config, str) and config in attentions():
        remedy = f"pass AttentionConfig(attention={config!r})"
    raise ConfigError("config", type(config).__name__, rule, remedy)
