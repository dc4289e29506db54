"""State files: small files by which the processes of a service exchange state; each has one writer and is replaced atomically."""
