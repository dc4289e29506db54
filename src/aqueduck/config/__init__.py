"""Models of the configuration files: one module per flow, and the sections that flows share."""
