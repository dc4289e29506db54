"""What is done to one target table inside an open lake transaction, and what the table has to look like."""
