"""Target tables: create, check, alter and write one inside an open lake transaction."""
