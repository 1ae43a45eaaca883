"""Every error that hostcache raises on purpose.

    HostCacheError
    |-- BadValue (also ValueError)     an argument can not be used
    |-- Busy                           someone else holds what the call needs, beyond its bound
    |-- CacheExists                    `create` met a cache of that name
    |-- CacheNotFound                  nothing of that name to attach to
    |-- Damaged                        the segment does not verify
    |-- FormatMismatch                 the segment holds another page or segment format
    |-- LeaseEnded                     a hold was used after its end
    |-- NoRoom                         memory, slots or records do not suffice
    |-- NotAllocated                   what is given back was never taken
    |-- NotAllowed                     another user's file, or one that others may write
    `-- Unsupported                    this build, file system or hold can not do that

A message says what is wrong, which object it is about, both numbers of a
mismatch, and what to do next. `code` is stable and meant for programs.
"""

from __future__ import annotations


class HostCacheError(Exception):
    """Base of all errors of hostcache."""

    code = "error"


class BadValue(HostCacheError, ValueError):
    """An argument can not be used; nothing was changed."""

    code = "bad_value"


class Busy(HostCacheError):
    """Another process holds what an open, remove or clear needs, for longer than the bound."""

    code = "busy"


class CacheExists(HostCacheError):
    """`create` was asked for a name that a cache has already."""

    code = "cache_exists"


class CacheNotFound(HostCacheError):
    """Nothing of that name exists in the root."""

    code = "cache_not_found"


class Damaged(HostCacheError):
    """The segment does not verify and may not be used."""

    code = "damaged"


class FormatMismatch(HostCacheError):
    """The segment was made with another page format or segment format."""

    code = "format_mismatch"


class LeaseEnded(HostCacheError):
    """A lease, reservation or part was used after its end."""

    code = "lease_ended"


class NoRoom(HostCacheError):
    """Memory, session slots, namespaces or records do not suffice."""

    code = "no_room"


class NotAllocated(HostCacheError):
    """What is given back was never taken."""

    code = "not_allocated"


class NotAllowed(HostCacheError):
    """The file or folder belongs to another user, or others may write to it."""

    code = "not_allowed"


class Unsupported(HostCacheError):
    """This build, file system, model or hold can not do what was asked."""

    code = "unsupported"
