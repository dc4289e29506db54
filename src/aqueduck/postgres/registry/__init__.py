"""The schema `aqueduck` in the source: what people want synced, and what the service writes back."""
