"""Adapters: each one plugs `hostcache` into one engine, under that engine's own names.

An adapter imports its engine, so import the one that you want:
`from hostcache.adapters.transformers import CachedModel`.
"""
