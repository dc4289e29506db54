"""What everything is made of, as plain values: nothing here opens a file, a socket, a process or a session."""
