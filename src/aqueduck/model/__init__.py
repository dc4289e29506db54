"""Plain values and pure decisions: nothing here opens a file, a socket, a process or a session."""
