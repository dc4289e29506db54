"""The tables of a group: what is known of them, their columns and their options."""
