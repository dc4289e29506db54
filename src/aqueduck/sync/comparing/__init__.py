"""How `verify` compares a table: rounds, and what each one reads."""
