"""The whole story on this machine: an embedded SSH host, a stand-in engine, and patches that fail and one that works."""
