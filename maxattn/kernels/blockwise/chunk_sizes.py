"""Chunk sizes of the blockwise kernel if the user sets none."""

from __future__ import annotations

from maxattn.call import Call

QUERY_CHUNKS = 64  # number of query chunks in a long sequence
LEAST_QUERY_CHUNK = 128  # with fewer queries a matmul's overhead shows (measured on a CPU)
KEY_CHUNK = 16384
SPARSE_CHUNK = 512  # for masks that leave chunks empty: short, so that many are skipped
LARGEST_PERIOD_CHUNK = 1024
PADDED_KEYS, LARGEST_PADDED_CHUNK = 8, 2048  # an eighth of the keys, so that padding is skipped


def choose_chunks(call: Call, query_chunk: int | None, key_chunk: int | None) -> tuple[int, int]:
    """Choose (query chunk, key chunk): the sizes that the user sets, else sizes by the mask.

    Without a mask: max(T // 64, 128) queries by 16,384 keys. If the mask leaves whole chunks empty,
    both sizes are 512, or the largest divisor from 128 to 1,024 of the mask's period (a frame
    block), so that chunks and blocks line up. With key padding alone: 128 to 2,048 keys, an eighth.
    """
    queries, keys = max(call.q_len // QUERY_CHUNKS, LEAST_QUERY_CHUNK), KEY_CHUNK
    if call.mask.leaves_parts_empty:
        period = call.mask.period()
        queries = keys = SPARSE_CHUNK
        if period is not None:
            sizes = range(min(period, LARGEST_PERIOD_CHUNK), LEAST_QUERY_CHUNK - 1, -1)
            queries = keys = next((n for n in sizes if period % n == 0), SPARSE_CHUNK)
    elif call.mask.bounds_tiles:
        keys = min(max(call.kv_len // PADDED_KEYS, LEAST_QUERY_CHUNK), LARGEST_PADDED_CHUNK)
    return min(query_chunk or queries, call.q_len), min(key_chunk or keys, call.kv_len)
