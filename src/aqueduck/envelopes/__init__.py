"""Change events as JSON: the envelopes, and the kernels that write them.  Pure, except for reading segments."""
