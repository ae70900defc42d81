"""Logs of one or several hosts: bytes as they come, through broken links."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployctl.domain.inventory import Host
from deployctl.domain.report import HostReport, Report
from deployctl.errors import LinkLost, Unreachable
from deployctl.remote.client import Exchange
from deployctl.workflows.run import Run

OnData = Callable[[str, bytes], None]
_OUTAGE_S = 600.0


def logs(run: Run, hosts: Sequence[Host], args: Mapping[str, Any], on_data: OnData) -> Report:
    """Send what `args` asks for to `on_data` (host name, bytes), from several threads but one at a time.

    A follow that loses its link comes back with what was written since: nothing twice, nothing lost, where no filter
    is set; with a filter it goes on from its return.
    """
    guard = threading.Lock()

    def one(host: Host) -> HostReport:
        asked = dict(args)
        lost_at: float | None = None
        while True:
            received = 0

            def take(event: Mapping[str, Any], _exchange: Exchange) -> None:
                nonlocal received
                if event["event"] == "data":
                    received += len(event["payload"])
                    with guard:
                        on_data(host.name, event["payload"])
                elif event["event"] == "log" and asked.get("follow"):
                    # From here on the same attempt is meant, whatever is launched meanwhile.
                    asked["attempt"] = event["attempt"]
                    asked["from_offset"] = event["offset"]
                elif event["event"] == "position":
                    asked["from_offset"] = event["offset"]

            try:
                return HostReport.from_result(host.name, run.ask(host, "logs", asked, on_event=take))
            except (LinkLost, Unreachable) as error:
                again = asked.get("follow") and (isinstance(error, LinkLost) or lost_at is not None)
                if not again or run.interrupted.is_set():
                    raise
                lost_at = lost_at or time.monotonic()
                if received:
                    lost_at = time.monotonic()
                if time.monotonic() - lost_at > _OUTAGE_S:
                    raise
                run.on_event(host.name, {"event": "link", "text": f"{error}; following again"})
                run.interrupted.wait(1.0)

    return run.each(hosts, one, command="logs", detaches=True)
