"""A stand-in for the SGLang inference engine: its log lines, processes, endpoints and ways to die, and no model.

It exists so that deployctl can be shown and tested on a machine without a GPU. Standard library only, Python 3.8+.
"""

from sglang.version import __version__

__all__ = ["__version__"]
