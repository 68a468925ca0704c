"""The wishes of a config for one role: kernel, strategy, fallback, and the keys that name them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from maxattn.config.rules import Role
from maxattn.config.settings import AttentionConfig
from maxattn.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """The wishes of a config for one role, and the keys that name them. Made by `Asked.of`.

    Args:
        kernel, kernel_key: the kernel, "auto" if it is left open, and the key that names it.
        strategy, strategy_key: the context strategy, likewise; "none" for cross-attention.
        fallback: "error", "warn" or "allow" another if the named one cannot run.
        text: how `explain` prints it.
    """

    kernel: str
    kernel_key: str
    strategy: str
    strategy_key: str
    fallback: str
    text: str

    @staticmethod
    @lru_cache(maxsize=256)
    def of(config: AttentionConfig, role: Role) -> Asked:
        """Read a config for "self" or "cross"; the same config is read once."""
        kernel, strategy = config.kernel_for(role), config.strategy_for(role)
        fallback = config.fallback_for(role)
        if role == "cross":
            key, text = "cross_attention", f"cross_attention: {config.cross_attention}"
            return Asked(kernel, key, strategy, key, fallback, text)
        parts = [f"attention: {config.attention}"]
        if config.attention_kernel:
            parts.append(f"attention_kernel: {config.attention_kernel}")
        if config.context_parallel != "auto":
            parts.append(f"context_parallel: {config.context_parallel}")
        if not config.attention_sharding_uniform:
            parts.append("attention_sharding_uniform: false")
        kernel_key = "attention_kernel" if config.attention_kernel == kernel else "attention"
        strategy_key = "context_parallel" if config.context_parallel == strategy else "attention"
        return Asked(kernel, kernel_key, strategy, strategy_key, fallback, ", ".join(parts))


def checked_config(config: AttentionConfig | None) -> AttentionConfig:
    """Return the config, the default one for None.

    Raises:
        ConfigError: for anything else.
    """
    if config is None:
        return AttentionConfig()
    if isinstance(config, AttentionConfig):
        return config
    makers = "AttentionConfig(...), AttentionConfig.from_yaml or AttentionConfig.from_overrides"
    rule = "it must be an AttentionConfig"
    raise ConfigError("config", type(config).__name__, rule, f"make one with {makers}")
