"""
Lake sessions: the DuckDB engine and its extensions, errors, quoting, files and storage.

There are two kinds of session.  `catalog.LakeSession` is for the one lake that a process writes
permanently: it has its own engine, threads share it under a lock, and it sets the limits of inlining.  `pool.PooledLake`
is for any of many lakes: one engine attaches up to `max_open` of them, which takes 30 ms per lake, while a
separate engine takes 250 ms and more memory; a session belongs to one thread.  Both attach with `catalog.attach` and write
with `engine.one_transaction`.
"""
