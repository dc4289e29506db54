"""The lake transactions: one commits a batch of all tables of a group with its position, one commits a finished copy."""
