"""The part of deployctl that runs on the host: standard library only, Python 3.8 to 3.14.

It is sent over stdin with every command and imported from memory (see `bootstrap.py`), so a host has nothing to
install and can never hold a stale copy. It may import nothing of the rest of deployctl, and nothing of deployctl may
import it: the client reads it as text.
"""
