"""The HTTP server of the service: page, API, probes, metrics."""
