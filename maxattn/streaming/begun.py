"""The pytree of a cache, which remembers whether a pass wrote since the cache was advanced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from maxattn.jax_private.mesh import is_tracer

if TYPE_CHECKING:
    from maxattn.streaming.kv_cache import KVCache

Flat = tuple[tuple[Any, ...], tuple[Any, ...]]
ARRAYS = ("k", "v", "frame", "until")


def register_cache(kind: type[KVCache], static: tuple[str, ...]) -> None:
    """Register the class of caches; `static` names the fields that are part of jit's cache key."""

    def flatten(cache: KVCache) -> Flat:
        given = (getattr(cache, name) for name in static)
        return tuple(getattr(cache, name) for name in ARRAYS), (*given, Begun(cache.is_begun))

    def flatten_with_keys(cache: KVCache) -> Flat:
        arrays, given = flatten(cache)
        keys = map(jax.tree_util.GetAttrKey, ARRAYS)
        return tuple(zip(keys, arrays, strict=True)), given

    def unflatten(given: tuple[Any, ...], arrays: Iterable[Any]) -> KVCache:
        *fields, begun = given
        cache = kind(*arrays, *fields)
        # A program must not depend on a value that is not in its key.
        known = isinstance(cache.frame, jax.Array) and not is_tracer(cache.frame)
        return cache._begun() if begun.is_begun and known else cache

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)


class Begun:
    """Whether no pass has written to a cache since it was advanced.

    All are equal, so that a pass may change it in a scan, and one program serves both.
    """

    def __init__(self, is_begun: bool) -> None:
        self.is_begun = is_begun

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Begun)

    def __hash__(self) -> int:
        return hash(Begun)
