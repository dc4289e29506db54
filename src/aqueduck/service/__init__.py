"""What the services of all flows share: checks, traces, and scheduled comparison."""
