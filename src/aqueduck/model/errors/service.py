"""Errors of a flow as a whole: its files, copies, routes, comparisons, registry and upkeep."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "ConfigError",
    "CopyDisturbedError",
    "MaintenanceError",
    "RegistryIncompleteError",
    "RoutingError",
    "ServiceLockedError",
    "TableDisabledError",
    "VerifyDifferenceError",
    "VerifyPostponedError",
]


class ConfigError(AqueduckError):
    """The configuration file, an option or an environment variable is wrong."""

    code = "config.invalid"
    exit_code = 2


class CopyDisturbedError(AqueduckError):
    """Something happened to a table while it was copied; the copy starts over by itself."""

    code = "copy.disturbed"
    retry = Retry.AUTO


class TableDisabledError(AqueduckError):
    """Somebody disabled the table: its changes are parked until it is enabled again."""

    code = "table.disabled"


class RoutingError(AqueduckError):
    """Rows cannot be told apart by the routing field and the destinations' values."""

    code = "fanout.routing"


class VerifyDifferenceError(AqueduckError):
    """Source and lake do not hold the same rows."""

    code = "verify.different"


class VerifyPostponedError(AqueduckError):
    """A comparison was given up, because the flow needs the machine."""

    code = "verify.postponed"
    retry = Retry.AUTO


class ServiceLockedError(AqueduckError):
    """Another service already runs this group."""

    code = "service.locked"


class RegistryIncompleteError(AqueduckError):
    """The registry lacks what the service or the lake knows, and nobody removed that."""

    code = "registry.incomplete"


class MaintenanceError(AqueduckError):
    """The lake could not be maintained; its rows are as they were."""

    code = "maintenance.failed"
