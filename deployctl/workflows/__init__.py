"""What the commands do: gather, ask the hosts, decide over several hosts. No output here: events and reports only."""
