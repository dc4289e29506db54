"""One picture of what runs, as plain values, for the page, the API, the probes and the metrics."""
