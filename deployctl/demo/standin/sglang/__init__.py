"""A stand-in for an inference engine: the log lines, processes, endpoints and ways to die of SGLang, and no model.

It exists so that a deploy tool can be shown and tested on a machine without a GPU. Standard library only.
"""
