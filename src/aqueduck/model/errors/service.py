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
    """A table changed while it was copied; the copy restarts automatically."""

    code = "copy.disturbed"
    retry = Retry.AUTO


class TableDisabledError(AqueduckError):
    """The table is disabled: its changes are parked until it is enabled."""

    code = "table.disabled"


class RoutingError(AqueduckError):
    """The routing field and the destinations' values do not separate rows."""

    code = "fanout.routing"


class VerifyDifferenceError(AqueduckError):
    """Source and lake do not have the same rows."""

    code = "verify.different"


class VerifyPostponedError(AqueduckError):
    """A comparison was stopped because the flow needs the machine."""

    code = "verify.postponed"
    retry = Retry.AUTO


class ServiceLockedError(AqueduckError):
    """Another service already runs this group."""

    code = "service.locked"


class RegistryIncompleteError(AqueduckError):
    """The registry lacks entries that the service or the lake knows and that were not removed."""

    code = "registry.incomplete"


class MaintenanceError(AqueduckError):
    """Maintenance of the lake failed; its rows are unchanged."""

    code = "maintenance.failed"
