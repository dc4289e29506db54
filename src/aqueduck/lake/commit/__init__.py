"""One lake transaction for all tables of a group and its position, and for the end of a copy."""
