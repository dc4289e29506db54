"""The destinations of a fan-out; each is written in one transaction of its lake."""
