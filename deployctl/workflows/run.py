"""One run of a command: its hosts asked in parallel, its events, and Ctrl-C."""

import contextlib
import getpass
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from deployctl.domain.inventory import Host, Inventory
from deployctl.domain.report import HostReport, Report
from deployctl.errors import DeployError, Interrupted, LinkLost, Unreachable, UsageError
from deployctl.remote.bundle import bundle_for as prepare
from deployctl.remote.client import Exchange, Request
from deployctl.transport import Transport, connect

OPERATOR_VARIABLE = "DEPLOYCTL_OPERATOR"
# Connections being made at once; hosts that are connected may be many more.
_MOST_CONNECTING = 64
_PATIENCE_AFTER_INTERRUPT_S = 60.0
_PATIENCE_OF_A_DETACH_S = 5.0
# What to type after an interrupt, by command; a load is what most others leave behind.
_AFTER_INTERRUPT = {"bench": "deployctl status shows how it stands; deployctl bench measures again"}
_AFTER_INTERRUPT_HINT = "deployctl status shows how it stands; deployctl wait comes back to a load"

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
        self._asked: set[str] = set()
        self._connecting: set[str] = set()
        self._guard = threading.Lock()
        self._doors = threading.BoundedSemaphore(_MOST_CONNECTING)

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
        undoing: bool = False,
    ) -> dict[str, Any]:
        """Run one operation on one host over a connection of its own.

        Args:
            host, operation, args, blobs: What to ask, and where.
            on_event: Called with every event.
            undoing: Whether it belongs to the end of an interrupted command, and Ctrl-C therefore does not end it.

        Raises:
            Unreachable, LinkLost: The host could not be asked, or the link broke before the verdict.
        """
        # Made ready while the connection is being made, which is mostly waiting.
        threading.Thread(target=prepare, args=(operation,), daemon=True).start()
        with self._connected(host) as transport:
            return self.ask_through(transport, host, operation, args, blobs=blobs, on_event=on_event, undoing=undoing)

    @contextlib.contextmanager
    def _connected(self, host: Host) -> Iterator[Transport]:
        """An open connection. Ctrl-C while it is being made means that nothing is asked over it."""
        fresh = not self.interrupted.is_set()
        with self._guard:
            if fresh:
                self._connecting.add(host.name)
        try:
            with self._doors:
                if fresh and self.interrupted.is_set():
                    raise Interrupted("interrupted before connecting: nothing was asked of the host")
                connection = self.connect(host)
                transport = connection.__enter__()
        finally:
            with self._guard:
                self._connecting.discard(host.name)
        try:
            if fresh and self.interrupted.is_set():
                raise Interrupted("interrupted while connecting: nothing was asked of the host")
            yield transport
        finally:
            connection.__exit__(*sys.exc_info())

    def ask_through(
        self,
        transport: Transport,
        host: Host,
        operation: str,
        args: Mapping[str, Any] | None = None,
        *,
        blobs: Mapping[str, bytes] | None = None,
        on_event: Callable[[Mapping[str, Any], Exchange], None] | None = None,
        undoing: bool = False,
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
        with (
            Exchange(transport, request, dead_peer_s=host.limits.dead_peer_s) as exchange,
            contextlib.nullcontext() if undoing else self._registered(host.name, exchange),
        ):
            for event in exchange.events():
                self.on_event(host.name, event)
                if on_event is not None:
                    on_event(event, exchange)
            assert exchange.result is not None
            return exchange.result

    @contextlib.contextmanager
    def _registered(self, name: str, exchange: Exchange) -> Iterator[None]:
        with self._guard:
            self._active.add(exchange)
            self._asked.add(name)
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
        """A reading operation, asked again when the link breaks, for up to `for_s` seconds.

        A host that was never reached has no broken link: there the ordinary tries of a connection decide.
        """
        from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

        broke = False

        def passing(error: BaseException) -> bool:
            nonlocal broke
            broke = broke or isinstance(error, LinkLost)
            lost = broke and isinstance(error, Unreachable) and error.kind_now in ("unreachable", "link-lost")
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

    def each(
        self,
        hosts: Sequence[Host],
        act: Callable[[Host], HostReport],
        *,
        command: str = "",
        detaches: bool = False,
    ) -> Report:
        """Do something on every host at once; nobody's outcome is lost, and Ctrl-C reaches all of them.

        Args:
            hosts: The hosts.
            act: What to do; runs in a thread of its own for each.
            command: Its name, as reported.
            detaches: Whether Ctrl-C may leave a host that does not answer (a load goes on there) instead of waiting
                for what it says (a push is being undone there).
        """
        name = command or self.command.split()[0]
        what_next = _AFTER_INTERRUPT.get(name, _AFTER_INTERRUPT_HINT)

        def settled(host: Host) -> HostReport:
            try:
                return act(host)
            except Unreachable as error:
                if not self.interrupted.is_set():
                    return HostReport.from_error(host.name, error)
                told = Interrupted(f"interrupted; {error.message}", hint=error.hint or what_next)
                return HostReport.from_error(host.name, told)
            except DeployError as error:
                return HostReport.from_error(host.name, error)

        with self._guard:
            self._asked.clear()
        # A thread for every host, however many: those of one push wait for each other before the commit.
        pool = ThreadPoolExecutor(max_workers=max(1, len(hosts)))
        try:
            futures = {pool.submit(settled, host): host for host in hosts}
            self._gather(futures, _PATIENCE_OF_A_DETACH_S if detaches else _PATIENCE_AFTER_INTERRUPT_S)
        finally:
            # A thread that still hangs in a connection must not keep the command: the process ends without it.
            pool.shutdown(wait=False, cancel_futures=True)
        reports = []
        for future, host in futures.items():
            if future.done() and not future.cancelled():
                reports.append(future.result())
            else:
                asked = host.name in self._asked
                error = Interrupted(
                    "interrupted; the host has not answered, what it does goes on"
                    if asked
                    else "interrupted while connecting: nothing was asked of the host",
                    hint=what_next if asked else "",
                )
                reports.append(HostReport.from_error(host.name, error))
        told = Report(command=name, hosts=_without_aliases(reports), interrupted=self.interrupted.is_set())
        return self.named(told, hosts)

    def named(self, report: Report, hosts: Sequence[Host]) -> Report:
        """A report whose hints name their hosts, unless these are the ones that a command without --host means."""
        try:
            if [host.name for host in self.inventory.select([])] == [host.name for host in hosts]:
                return report
        except UsageError:
            pass  # there are none
        return replace(report, hosts=tuple(host.named() for host in report.hosts))

    def _gather(self, futures: Mapping[Future[HostReport], Host], patience_s: float) -> None:
        """Wait for all; on Ctrl-C ask every host to stop, and wait for what those say that are connected."""
        pending = set(futures)
        deadline: float | None = None
        while pending:
            try:
                _, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if self.interrupted.is_set():
                    raise
                self.interrupt()
                deadline = time.monotonic() + patience_s
            if deadline is not None:
                with self._guard:
                    pending = {future for future in pending if futures[future].name not in self._connecting}
                if time.monotonic() > deadline:
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
