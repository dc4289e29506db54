"""PostgreSQL: sessions, the catalog, publications and slots, decoding, capture, copies, and the registry."""
