"""From PostgreSQL's bytes to columns: pgoutput, test_decoding, and both formats of COPY."""
