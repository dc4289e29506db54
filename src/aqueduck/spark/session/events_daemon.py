"""
Spark's Python daemon for the events flow: like `worker_daemon`, and it compiles the JSON kernels before it forks.

Set as `spark.python.daemon.module`.
"""

from __future__ import annotations

import gc
import os

from pyspark import daemon

import aqueduck.spark.query.events_source
import aqueduck.spark.query.part_writer  # noqa: F401 - imported for the workers
from aqueduck.envelopes.json_events import warm_up
from aqueduck.spark.session.quiet_worker import quiet_worker
from aqueduck.state_files.private_files import restrict_new_files

if __name__ == "__main__":
    restrict_new_files(os.environ)  # a worker of a cluster does not inherit the driver's umask
    warm_up()
    gc.freeze()
    daemon.worker = quiet_worker
    daemon.manager()
