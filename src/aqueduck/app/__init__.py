"""The service and its command line."""
