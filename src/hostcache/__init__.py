"""A shared-memory cache of KV pages for LLM engines: what one engine process computed, every
other on the machine reuses, and so does the next one after a crash.

    import hostcache as hc

    cache = hc.KvCache.open("chat", hc.PageFormat(page_bytes, page_tokens=64), capacity="4GiB")
    keys = hc.prefix_keys(token_ids, page_tokens=64, namespace=namespace)
    with cache.lookup(keys) as lease:                  # lease.view(i): what is there, to read
        with cache.reserve(lease.missing) as pages:    # pages.view(i): the rest, to write
            ...
            pages.commit()

This file holds all public names; what is in no `__all__` may change at any time.
"""

import atexit

from hostcache import _core
from hostcache.errors import (
    BadValue,
    Busy,
    CacheExists,
    CacheNotFound,
    Damaged,
    FormatMismatch,
    HostCacheError,
    LeaseEnded,
    NoRoom,
    NotAllocated,
    NotAllowed,
    Unsupported,
)
from hostcache.keylists import KeyList, Missing
from hostcache.keys import Namespace, content_key, prefix_keys, weights_fingerprint
from hostcache.kv import KvCache
from hostcache.pages import Lease, PageFormat, Part, Reservation
from hostcache.segments import CacheInfo, caches, remove
from hostcache.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "BadValue",
    "Busy",
    "CacheExists",
    "CacheInfo",
    "CacheNotFound",
    "Damaged",
    "FormatMismatch",
    "HostCacheError",
    "KeyList",
    "KvCache",
    "Lease",
    "LeaseEnded",
    "Missing",
    "Namespace",
    "NoRoom",
    "NotAllocated",
    "NotAllowed",
    "PageFormat",
    "Part",
    "Reservation",
    "Stats",
    "Unsupported",
    "__version__",
    "caches",
    "content_key",
    "prefix_keys",
    "remove",
    "weights_fingerprint",
]

# While the interpreter is still whole: sessions end, and the core's timer is joined.
atexit.register(_core.shutdown)
