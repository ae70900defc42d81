"""The story on this machine: an embedded SSH host, a stand-in engine, patches that fail and one that works."""
