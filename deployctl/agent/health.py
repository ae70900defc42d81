"""Asking a server over HTTP from the host itself: no proxies, every answer bounded in time and size."""

import http.client
import json
import threading
import time
from urllib.parse import urlsplit

# SGLang's /health generates a token and may take up to 20 s before it says 503 (SGLANG_HEALTH_CHECK_TIMEOUT).
HEALTH_TIMEOUT_S = 25.0
INTERVAL_S = 1.0
_MAX_BODY = 4 << 20


def request(url, method="GET", body=None, timeout_s=HEALTH_TIMEOUT_S, headers=None):
    """One HTTP request.

    Returns:
        (status, body bytes).

    Raises:
        OSError, http.client.HTTPException: Refused, cut, timed out, or no HTTP.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    fields = dict(headers or {})
    payload = None
    if body is not None:
        payload = json.dumps(body).encode("utf-8")
        fields["Content-Type"] = "application/json"
    try:
        connection.request(method, target, payload, fields)
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BODY)
    finally:
        connection.close()


def base_of(url):
    """`http://host:port` of a URL."""
    parts = urlsplit(url)
    host = "[%s]" % parts.hostname if ":" in parts.hostname else parts.hostname
    return "http://%s:%d" % (host, parts.port or 80)


class Probe:
    """Asks a health URL in the background, at most once a second; `status` is the last answer.

    Attributes:
        status: HTTP status of the last answer, None before the first, 0 when nothing answered.
        healthy: Whether the last answer was 200.
        answers: How many came so far, failures to answer included.
    """

    def __init__(self, url, headers=None):
        self._url = url
        self._headers = headers
        self._ended = False
        self._wake = threading.Event()
        self.status = None
        self.answers = 0
        self.healthy = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self):
        while not self._ended:
            began = time.monotonic()
            self._wake.clear()
            try:
                status, _ = request(self._url, headers=self._headers)
            except (OSError, http.client.HTTPException, ValueError):
                status = 0
            if status == 200:
                self.healthy.set()
            else:
                self.healthy.clear()
            self.status = status
            self.answers += 1
            self._wake.wait(max(0.05, INTERVAL_S - (time.monotonic() - began)))

    def ask_now(self):
        """Ask once without waiting for the interval."""
        self._wake.set()

    def stop(self):
        """No further questions."""
        self._ended = True
        self._wake.set()


def authorization(argv):
    """The header that `--api-key KEY` on the server's command line asks for, or {}."""
    for position, word in enumerate(argv):
        if word == "--api-key" and position + 1 < len(argv):
            return {"Authorization": "Bearer " + argv[position + 1]}
        if word.startswith("--api-key="):
            return {"Authorization": "Bearer " + word.partition("=")[2]}
    return {}
