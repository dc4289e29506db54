"""One picture of the running service, as plain values, for the page, the API, the probes and the metrics."""
