"""Reading a slot: the thread that reads, decodes and stages changes, and the readers behind it."""
