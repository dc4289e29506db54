"""The files that people write, as models: one module a flow, and what the flows share."""
