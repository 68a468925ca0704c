"""Writes a config as YAML: the keys that differ from their default, in the order of the config."""

from __future__ import annotations

from typing import Any

import yaml

from maxattn.config.settings import AttentionConfig


def changed_values(config: AttentionConfig) -> dict[str, Any]:
    """Return the keys that differ from their default as plain values, without unset sizes."""
    values = {key: value for key, value in config.resolved().items() if key in config.changed}
    if sizes := values.get("flash_block_sizes"):
        values["flash_block_sizes"] = {key: size for key, size in sizes.items() if size is not None}
    return values


def yaml_of(config: AttentionConfig) -> str:
    """Write a config so that `AttentionConfig.from_yaml` reads it back as it is."""
    values = changed_values(config) or {"attention": config.attention}
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False)
