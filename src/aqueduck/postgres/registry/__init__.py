"""The schema `aqueduck` in the source: the desired configuration, and the state that the service writes back."""
