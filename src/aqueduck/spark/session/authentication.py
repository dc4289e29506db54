"""
Spark's authentication: the settings that make Spark refuse processes of other users, for each kind of master.

Spark generates the secret itself if it starts the executors (`local`, YARN, Kubernetes).  The master and the workers of
a standalone cluster run already, so their secret must be configured.  This module also selects the settings that Spark's
launcher may put on a command line, which every user of the host can read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["authentication", "open_to_strangers", "unsecret"]

AUTHENTICATE = "spark.authenticate"
SECRET = "spark.authenticate.secret"  # noqa: S105 - a name
SECRET_FILE = "spark.authenticate.secret.file"  # noqa: S105 - a name

_LAUNCHER = re.compile(
    r"spark\.(master|app\.name|files|archives|jars(\..*)?|driver\..*|submit\..*|kerberos\..*)"
)
_SECRET_NAME = re.compile(r"secret|password|token", re.IGNORECASE)


def authentication(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Settings that make Spark refuse processes of other users, if possible; `conf` may override them."""
    if open_to_strangers(master, conf):
        return {}
    settings = {AUTHENTICATE: "true"}
    if not master.startswith("local"):
        settings["spark.network.crypto.enabled"] = "true"
    if master.startswith("local-cluster"):
        settings[SECRET] = secrets.token_hex(32)
    if master.startswith("spark:") and SECRET not in conf:
        settings[SECRET] = _read_secret(Path(conf[SECRET_FILE]))
    return settings


def open_to_strangers(master: str, conf: Mapping[str, str]) -> str | None:
    """A hint if users who can connect to Spark's ports can read its blocks; None if they cannot."""
    if conf.get(AUTHENTICATE, "true").lower() != "true":
        return f"remove {AUTHENTICATE} from spark.conf"
    if master.startswith("spark:") and SECRET not in conf and SECRET_FILE not in conf:
        return f"configure a secret for master and workers, and name its file in spark.conf: {SECRET_FILE}"
    return None


def unsecret(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that Spark's launcher itself needs and puts on the command line of the JVM."""
    return {
        key: value
        for key, value in settings.items()
        if _LAUNCHER.fullmatch(key) and not _SECRET_NAME.search(key)
    }


def _read_secret(path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as exc:
        raise ConfigError(f"{SECRET_FILE}: {path} cannot be read: {system_reason(exc)}") from None
    if not secret:
        raise ConfigError(f"{SECRET_FILE}: {path} is empty", hint="write the secret of the cluster into it")
    return secret
