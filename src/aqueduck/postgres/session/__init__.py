"""Connections to PostgreSQL: opening and guarding them, errors, the server's identity and the group's lock."""
