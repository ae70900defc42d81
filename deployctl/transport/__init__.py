"""Reaching a host: one command's streams, over SSH or on this machine. The only place that knows fabric and paramiko."""

from deployctl.transport.base import Channel, Completed, Transport
from deployctl.transport.local import LocalTransport

__all__ = ["Channel", "Completed", "LocalTransport", "Transport"]
