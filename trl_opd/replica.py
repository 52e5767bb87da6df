"""One server over HTTP: its URL, one try of a request, how it has fared lately, and what can go wrong."""

from __future__ import annotations

import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx

T = TypeVar("T")
Answer = dict[str, Any]

API_KEY = "VLLM_API_KEY"
"""Environment variable of the key that servers started with `--api-key` ask for."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds until a failed request is tried again; the wait doubles with each failure."""
CONNECT_SECONDS = 10.0

logger = logging.getLogger(__name__)


class ServerError(Exception):
    """A server could not do what a run needs, and trying again did not help. The trainer saves a checkpoint and stops."""


class RequestRefused(ServerError):
    """A server said that the request itself is wrong (4xx): too long, unknown model, no access."""

    def __init__(self, message: str, status: int = 0) -> None:  # pickled to other processes, it is made without it
        super().__init__(message)
        self.status = status


class BadAnswer(Exception):
    """For readers of answers: a 200 came, but its content is not what was asked for. It is tried again like a 500."""


class Failed(Exception):
    """One try failed in a way that may pass.

    Args:
        message: What happened.
        lost: Whether the server may have been restarted since.
        retry_after: Seconds for which the server asks to be left alone.
    """

    def __init__(self, message: str, *, lost: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.lost, self.retry_after = lost, retry_after


class Replica:
    """One server, and how it has fared lately. What threads share is changed under `lock` only.

    Args:
        url: As `parse_url` returns it.
        client: What requests are sent with.
        lock: That of all replicas.
    """

    def __init__(self, url: str, client: httpx.Client, lock: threading.Lock) -> None:
        self.url, self._client, self._lock = url, client, lock
        self.busy = self.asked = 0
        self.failures = 0  # since it last answered
        self.rests_until = float("-inf")
        self.trouble = ""
        self.told_at = float("-inf")
        self.behind = False  # it may have missed the lasting request, or lost what that did
        self.telling = threading.Lock()
        self._failed_at = float("-inf")

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Counts a request, and notes how it went: after a failure the replica rests."""
        began = time.monotonic()
        with self._lock:
            self.busy += 1
            self.asked += 1
        try:
            yield
        except Failed as failed:
            self._rest(failed, began)
            raise
        else:
            if self.failures and began >= self._failed_at:  # else it is an answer from before the failure
                logger.warning("%s answers again.", self.url)
                self.failures = 0
        finally:
            with self._lock:
                self.busy -= 1

    def _rest(self, failed: Failed, began: float) -> None:
        with self._lock:
            now = time.monotonic()
            self.trouble = str(failed)
            self.behind |= failed.lost
            if began >= self._failed_at:  # else one of many requests that were under way when it failed
                self.failures += 1
                self._failed_at = now
                if self.failures == 1:
                    logger.warning("%s: %s. The request is tried again.", self.url, failed)
            self.rests_until = max(self.rests_until, now + backoff(self.failures), now + failed.retry_after)

    def send(self, method: str, path: str, payload: Answer | None = None) -> httpx.Response:
        """One try. The key goes out with it, and into no message.

        Raises:
            Failed: If it may go better next time.
            RequestRefused: If it will not.
        """
        try:
            response = self._client.request(method, self.url + path, json=payload)
        except httpx.TimeoutException as error:
            raise Failed(f"no answer in time ({type(error).__name__})", lost=True) from error
        except httpx.TransportError as error:
            raise Failed(f"{type(error).__name__}: {error}", lost=True) from error
        status = response.status_code
        if status == 200:
            return response
        said = f"status {status}: {_message(response)}"
        if status in (408, 429) or status >= 500:
            raise Failed(said, retry_after=_retry_after(response))
        raise RequestRefused(f"{self.url} answered {said}", status)


def http_client(seconds: float, connections: int) -> httpx.Client:
    """Sends requests straight to where they are addressed, with the key if there is one.

    Args:
        seconds: Longest silence of a server.
        connections: How many are kept open.
    """
    key = os.environ.get(API_KEY, "").strip()
    return httpx.Client(
        timeout=httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds), pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        verify=ssl.create_default_context(),  # the system's certificates; SSL_CERT_FILE names others
        trust_env=False,  # no proxy, which would get requests to this machine too, and no login of ~/.netrc
    )


def is_url(name: object) -> bool:
    """Whether a model is named by the URL of a server."""
    return isinstance(name, str) and name.lower().startswith(("http://", "https://"))


def parse_url(url: str) -> tuple[str, str | None]:
    """Where the server is, without "/v1" and the last slash, and the model that the fragment names.

    Raises:
        ValueError: If it is no URL of a server, or holds a password.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError(
            f"The URL of the server at {parts.hostname} holds a user name or a password, which would end up in logs. Take it "
            f"out, and put the server's key into the environment variable {API_KEY}."
        )
    if not is_url(url) or not parts.hostname or parts.query:
        raise ValueError(f"'{url.split('@')[-1]}' is not the URL of a server. Give one such as 'http://localhost:8000'.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}", unquote(parts.fragment) or None


def read_answer(response: httpx.Response, read: Callable[[Answer], T]) -> T:
    """What `read` makes of a JSON answer. Raises `Failed` if it is not what was asked for."""
    try:
        return read(json_object(response))
    except BadAnswer as bad:
        raise Failed(f"status 200, but {bad}") from bad
    except (LookupError, TypeError) as bad:
        raise Failed(f"status 200, but the answer is incomplete ({type(bad).__name__}: {bad})") from bad


def json_object(response: httpx.Response) -> Answer:
    """The answer; {} for an empty one. Raises `Failed` if it is no JSON object."""
    if not response.content:
        return {}
    try:
        answer = response.json()
    except ValueError as error:
        raise Failed(f"status 200, but no JSON: {response.text[:100]!r}") from error
    if not isinstance(answer, dict):
        raise Failed(f"status 200, but no JSON object: {response.text[:100]!r}")
    return answer


def backoff(failures: int) -> float:
    """Seconds, drawn so that requests that failed together are not repeated together."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)


def _message(response: httpx.Response) -> str:
    """The server's own words: of the error object that vLLM and OpenAI send, else the body. Without a key it may repeat."""
    try:
        found = response.json()
    except ValueError:
        found = response.text or response.reason_phrase
    for key in ("error", "message", "detail"):
        found = found[key] if isinstance(found, dict) and key in found else found
    sent = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    text = str(found)[:500].rstrip(".\n ")
    return text.replace(sent, "***") if sent else text


def _retry_after(response: httpx.Response) -> float:
    """Seconds; a date, the header's other form, counts as none."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
