"""Patch, launch, watch and roll back an installed LLM inference engine on GPU servers."""

__version__ = "0.1.0"
