"""Before a service and after it: a first file, and taking back what was created."""
