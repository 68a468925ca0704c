"""Video that is made block by block: `Stream` describes it, and makes its masks and its cache."""

from maxattn.streaming.kv_cache import CacheLayer, KVCache
from maxattn.streaming.layout import CacheLayout
from maxattn.streaming.stream import Stream

__all__ = ["CacheLayer", "CacheLayout", "KVCache", "Stream"]
