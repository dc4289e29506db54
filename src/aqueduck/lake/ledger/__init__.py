"""What we record in the lake about our work: positions, table states, parked changes, marks."""
