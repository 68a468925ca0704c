"""The config: what a YAML may say, how it is read, checked, overridden and written."""

from __future__ import annotations

from maxattn.config.errors import ConfigErrors
from maxattn.config.section import Section
from maxattn.config.settings import AttentionConfig, FlashBlockSizes

__all__ = ["AttentionConfig", "ConfigErrors", "FlashBlockSizes", "Section"]
