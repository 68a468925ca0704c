"""The config: its settings, and how it is read, checked, overridden and written."""

from __future__ import annotations

from maxattn.config.errors import ConfigErrors
from maxattn.config.maxdiffusion import Imported
from maxattn.config.section import Section
from maxattn.config.settings import AttentionConfig, FlashBlockSizes
from maxattn.config.target_names import read_target

__all__ = [
    "AttentionConfig",
    "ConfigErrors",
    "FlashBlockSizes",
    "Imported",
    "Section",
    "read_target",
]
