"""Change events as JSON: what an event looks like, and the kernels that write it.  Pure."""
