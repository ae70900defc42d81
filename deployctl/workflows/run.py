"""One run of a command: its hosts asked in parallel, its events, and Ctrl-C."""

import contextlib
import getpass
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from deployctl.domain.inventory import Host, Inventory
from deployctl.domain.report import HostReport, Report
from deployctl.errors import DeployError, Interrupted, LinkLost, Unreachable
from deployctl.remote.bundle import bundle_for as prepare
from deployctl.remote.client import Exchange, Request
from deployctl.transport import Transport, connect

OPERATOR_VARIABLE = "DEPLOYCTL_OPERATOR"
_MOST_AT_ONCE = 16
_PATIENCE_AFTER_INTERRUPT_S = 60.0

OnEvent = Callable[[str, Mapping[str, Any]], None]


def operator(environment: Mapping[str, str] | None = None) -> str:
    """Who is at work: `$DEPLOYCTL_OPERATOR`, else git's user.email, else login@host."""
    environment = os.environ if environment is None else environment
    named = environment.get(OPERATOR_VARIABLE, "").strip()
    if named:
        return named
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["git", "config", "user.email"], capture_output=True, text=True, timeout=5, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    try:
        login = getpass.getuser()
    except (KeyError, OSError):
        login = str(os.getuid())
    return f"{login}@{socket.gethostname()}"


class Run:
    """What all workflows of one command share.

    Args:
        inventory: The loaded hosts.yaml.
        command: The command line in words, for locks and the audit log.
        on_event: Called with (host name, event), from several threads.
        connect: How to reach a host; tests pass another.
    """

    def __init__(
        self,
        inventory: Inventory,
        *,
        command: str,
        on_event: OnEvent = lambda _host, _event: None,
        connect: Callable[[Host], Transport] = connect,
        who: str = "",
    ) -> None:
        self.inventory = inventory
        self.command = command
        self.on_event = on_event
        self.connect = connect
        self.run_id = secrets.token_hex(8)
        self._who = who
        self.interrupted = threading.Event()
        self._active: set[Exchange] = set()
        self._guard = threading.Lock()

    @property
    def who(self) -> str:
        """The operator, asked for once."""
        if not self._who:
            self._who = operator()
        return self._who

    # -- one host ----------------------------------------------------------------------------------------------------

    def ask(
        self,
        host: Host,
        operation: str,
        args: Mapping[str, Any] | None = None,
        *,
        blobs: Mapping[str, bytes] | None = None,
        on_event: Callable[[Mapping[str, Any], Exchange], None] | None = None,
    ) -> dict[str, Any]:
        """Run one operation on one host over a connection of its own.

        Raises:
            Unreachable, LinkLost: The host could not be asked, or the link broke before the verdict.
        """
        # Made ready while the connection is being made, which is mostly waiting.
        threading.Thread(target=prepare, args=(operation,), daemon=True).start()
        with self.connect(host) as transport:
            return self.ask_through(transport, host, operation, args, blobs=blobs, on_event=on_event)

    def ask_through(
        self,
        transport: Transport,
        host: Host,
        operation: str,
        args: Mapping[str, Any] | None = None,
        *,
        blobs: Mapping[str, bytes] | None = None,
        on_event: Callable[[Mapping[str, Any], Exchange], None] | None = None,
    ) -> dict[str, Any]:
        """The same, over an open connection."""
        request = Request(
            operation=operation,
            python=host.python,
            host=host.as_request(),
            args=args or {},
            blobs=blobs or {},
            run_id=self.run_id,
            operator=self.who,
            command=self.command,
        )
        with Exchange(transport, request, dead_peer_s=host.limits.dead_peer_s) as exchange, self._registered(exchange):
            for event in exchange.events():
                self.on_event(host.name, event)
                if on_event is not None:
                    on_event(event, exchange)
            assert exchange.result is not None
            return exchange.result

    @contextlib.contextmanager
    def _registered(self, exchange: Exchange) -> Iterator[None]:
        with self._guard:
            self._active.add(exchange)
        try:
            if self.interrupted.is_set():
                exchange.control("cancel")
            yield
        finally:
            with self._guard:
                self._active.discard(exchange)

    def ask_patiently(
        self, host: Host, operation: str, args: Mapping[str, Any] | None = None, *, for_s: float = 60.0
    ) -> dict[str, Any]:
        """A reading operation, asked again when the link breaks, for up to `for_s` seconds."""
        from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

        def passing(error: BaseException) -> bool:
            lost = isinstance(error, LinkLost) or (isinstance(error, Unreachable) and error.kind_now == "unreachable")
            return lost and not self.interrupted.is_set()

        retrying = Retrying(
            retry=retry_if_exception(passing),
            stop=stop_after_delay(for_s),
            wait=wait_exponential_jitter(multiplier=0.5, max=5.0),
            reraise=True,
        )
        result: dict[str, Any] = retrying(self.ask, host, operation, args)
        return result

    # -- several hosts -----------------------------------------------------------------------------------------------

    def each(self, hosts: Sequence[Host], act: Callable[[Host], HostReport], *, command: str = "") -> Report:
        """Do something on every host at once; nobody's outcome is lost, and Ctrl-C reaches all of them."""
        name = command or self.command.split()[0]

        def settled(host: Host) -> HostReport:
            try:
                return act(host)
            except DeployError as error:
                return HostReport.from_error(host.name, error)

        with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE * 4, max(1, len(hosts)))) as pool:
            futures = {pool.submit(settled, host): host for host in hosts}
            self._gather(set(futures))
            reports = []
            for future, host in futures.items():
                if future.done() and not future.cancelled():
                    reports.append(future.result())
                else:
                    reports.append(HostReport.from_error(host.name, Interrupted("interrupted")))
        return Report(command=name, hosts=_without_aliases(reports))

    def _gather(self, futures: set[Future[HostReport]]) -> None:
        """Wait for all; on Ctrl-C ask every host to stop, and wait for what they say."""
        pending = futures
        deadline: float | None = None
        while pending:
            try:
                _, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if self.interrupted.is_set():
                    raise
                self.interrupt()
                deadline = time.monotonic() + _PATIENCE_AFTER_INTERRUPT_S
            if deadline is not None and time.monotonic() > deadline:
                return

    def interrupt(self) -> None:
        """Ask every operation that is under way to stop: a push is undone, a wait detaches."""
        self.interrupted.set()
        with self._guard:
            active = list(self._active)
        for exchange in active:
            with contextlib.suppress(DeployError):
                exchange.control("cancel")


def _without_aliases(reports: Sequence[HostReport]) -> tuple[HostReport, ...]:
    """Several names of one machine: the others get the result of the one that did the work."""
    by_name = {report.name: report for report in reports}
    settled = []
    for report in reports:
        target = by_name.get(str(report.fields.get("alias_of")))
        if report.error and report.error.get("kind") == "alias" and target is not None:
            fields = {**target.fields, "alias_of": target.name}
            settled.append(
                HostReport(
                    name=report.name,
                    status=target.status,
                    exit_code=target.exit_code,
                    error=target.error,
                    fields=fields,
                )
            )
        else:
            settled.append(report)
    return tuple(settled)
