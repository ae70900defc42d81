"""Speaking with the agent: ships its modules, frames requests, reads its events."""
