"""
Aqueduck carries changes from PostgreSQL into DuckLake tables, on Apache Spark.

The modules beside this one are pure: they open no socket and no session.  A subpackage
is named after what it touches: `postgres`, `lake`, `sinks`, `spark`, and `app` on top.
"""

from __future__ import annotations

__version__ = "0.1.0"
