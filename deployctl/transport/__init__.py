"""Reaching a host: one command's streams, over SSH or on this machine. Alone in knowing paramiko."""

from deployctl.domain.inventory import Host
from deployctl.transport.base import Channel, Completed, Transport
from deployctl.transport.local import LocalTransport


def connect(host: Host) -> Transport:
    """The transport of a host; entering it connects."""
    if host.connection == "local":
        return LocalTransport()
    from deployctl.transport.ssh import SshTransport
    from deployctl.transport.ssh_connect import Target

    return SshTransport(
        Target(
            name=host.name,
            address=host.address,
            user=host.user,
            port=host.port,
            jump=host.jump,
            host_keys=host.host_keys,
            connect_timeout_s=host.limits.connect_s,
            tries=host.limits.connect_tries,
            dead_peer_s=host.limits.dead_peer_s,
        )
    )


__all__ = ["Channel", "Completed", "LocalTransport", "Transport", "connect"]
