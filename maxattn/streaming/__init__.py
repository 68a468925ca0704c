"""Video made block by block: one description of blocks and window, its masks and its cache."""

from maxattn.streaming.kv_cache import CacheLayer, KVCache
from maxattn.streaming.layout import CacheLayout
from maxattn.streaming.stream import Stream

__all__ = ["CacheLayer", "CacheLayout", "KVCache", "Stream"]
