"""Upkeep of a lake: flush, merge, expire, remove orphaned files, statistics, health."""
