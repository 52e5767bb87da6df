"""Replicas of one OpenAI-compatible vLLM server: requests tried again, load shared, a replica may die and come back.

A request is tried again until `timeout` seconds have passed since it was first tried. What may pass: no connection, no answer
in time, status 408, 429 or 5xx, and a 200 whose content is wrong. Any other status is an error at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from .replica import API_KEY, Answer, Failed, Replica, backoff, http_client, json_object, parse_url, read_answer
from .replica import BadAnswer as BadAnswer
from .replica import RequestRefused as RequestRefused
from .replica import ServerError as ServerError

T = TypeVar("T")


class Servers:
    """Replicas of one OpenAI-compatible vLLM server.

    Requests go to the least busy replica. One that fails rests for a while, longer each time, and is then tried again; a
    server that comes back is used again. Safe to use from several threads.

    Servers are reached directly: proxies and logins that environment variables or `~/.netrc` name play no part, since they
    would catch requests to this machine and to neighbours in a cluster too. The key in VLLM_API_KEY, if there is one, goes
    to these servers only, and into no message.

    Args:
        urls: "http://host:port", with or without "/v1"; "http://host:port#name" names the served model.
        timeout: Seconds during which a request is tried again. One try may take as long, or half as long where there are
            several replicas.
        concurrency: Most requests of one `ask_all` at a time.

    Raises:
        ValueError: If a URL is none, holds a password, or the replicas name different models.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float, concurrency: int = 64) -> None:
        parsed = dict(parse_url(url) for url in urls)
        models = {model for _, model in map(parse_url, urls)}
        if not parsed:
            raise ValueError("The list of servers is empty. Give at least one URL, such as 'http://localhost:8000'.")
        if len(models) > 1:
            raise ValueError(
                f"The servers {list(urls)} name different models, but a list of servers means replicas of one. Let each name "
                "the same after its '#', or none."
            )
        self.model: str | None = models.pop()
        """The served model that the URLs name."""
        self.urls, self.timeout, self.concurrency = list(parsed), timeout, concurrency
        self._lock = threading.Lock()
        client = http_client(timeout if len(parsed) == 1 else timeout / 2, concurrency)
        self._replicas = [Replica(url, client, self._lock) for url in parsed]
        self._lasting: tuple[str, Answer] | None = None

    def __repr__(self) -> str:
        return f"Servers({self.urls})"

    def ask(self, path: str, payload: Answer, read: Callable[[Answer], T]) -> T:
        """What `read` makes of one replica's answer.

        Args:
            path: As in the server's documentation, "/v1/completions".
            payload: Sent as JSON.
            read: Takes the JSON answer; raises `BadAnswer` if it is not what was asked for. LookupError and TypeError count
                as `BadAnswer`, so that it may take a complete answer for granted.

        Raises:
            RequestRefused: If a server says that the request is wrong.
            ServerError: If no replica gave a good answer in time.
        """
        return self._ask(path, payload, read, "the request", threading.Event())

    def ask_all(
        self,
        path: str,
        payloads: Sequence[Answer],
        read: Callable[[int, Answer], T],
        rows: Sequence[int] | None = None,
    ) -> list[T]:
        """What `read` makes of the answers, in the order of the payloads, of which at most `concurrency` are under way.

        Args:
            path: As in `ask`.
            payloads: Each is a request.
            read: As in `ask`, with the payload's number before the answer; called in other threads.
            rows: What errors call each payload; by default its number.

        Raises:
            RequestRefused: As in `ask`; so also ServerError. The other requests are given up.
        """
        if not payloads:
            return []
        names = range(len(payloads)) if rows is None else rows
        stop = threading.Event()
        executor = ThreadPoolExecutor(min(self.concurrency, len(payloads)), thread_name_prefix="servers")
        try:
            futures = [
                executor.submit(self._ask, path, payload, partial(read, number), f"row {name}", stop)
                for number, (payload, name) in enumerate(zip(payloads, names, strict=True))
            ]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:  # after an error: what is under way ends by itself, and is not tried again
            stop.set()
            executor.shutdown(wait=False, cancel_futures=True)

    def ask_each(self, path: str, payload: Answer, read: Callable[[Answer], T]) -> list[T]:
        """What `read` makes of the answer of every replica that does not rest; one try each, failures are left out.

        Raises:
            RequestRefused: If a replica says that the request is wrong.
        """
        found = []
        for replica in self._replicas:
            if replica.rests_until <= time.monotonic():
                try:
                    with replica.under_way():
                        self._catch_up(replica)
                        found.append(read_answer(replica.send("POST", path, payload), read))
                except Failed:
                    continue
                except RequestRefused as refused:
                    raise _refused(refused, path, "a probe") from None
        return found

    def tell_each(self, path: str, payload: Answer, *, lasting: bool = False) -> None:
        """Sends the same request to every replica, as when an adapter is published; what they answer is not read.

        A replica that is down is left out, as long as another takes the request. A `lasting` request is repeated to it when it
        is back, before it gets any other. So it is to a server that was restarted in between, which shows in a lost connection
        or in a 404 (it no longer knows the adapter). Only the latest lasting request is kept, and repeating it must do no harm
        (for an adapter: `"load_inplace": True`).

        Raises:
            RequestRefused: If a replica says that the request is wrong; the others were told.
            ServerError: If no replica could be told in time.
        """
        if lasting:
            with self._lock:
                self._lasting = (path, payload)
                for replica in self._replicas:
                    replica.behind = True
        began, tries = time.monotonic(), 0
        while not self._tell_round(path, payload, lasting):
            tries += 1
            self._wait(tries, began, path, "the request to each of them", self._replicas)

    def was_told(self, path: str, payload: Answer) -> None:
        """The first process has told each replica this `lasting` request; here it is only repeated to one that has lost it."""
        with self._lock:
            self._lasting = (path, payload)

    def get(self, path: str) -> list[Answer]:
        """What every replica answers to a GET, for probes; {} for an empty body. One that is still starting is waited for.

        Raises:
            RequestRefused: As in `ask`.
            ServerError: If any replica gave no answer in time.
        """
        with ThreadPoolExecutor(len(self._replicas)) as executor:
            return list(executor.map(partial(self._get, path), self._replicas))

    def _ask(self, path: str, payload: Answer, read: Callable[[Answer], T], what: str, stop: threading.Event) -> T:
        began, tries = time.monotonic(), 0
        last: Replica | None = None
        repeated: set[str] = set()
        while (replica := self._take(began + self.timeout, last, stop)) is not None:
            tries, last, now = tries + 1, replica, time.monotonic()
            try:
                with replica.under_way():
                    self._catch_up(replica)
                    return read_answer(replica.send("POST", path, payload), read)
            except Failed:
                stop.wait(backoff(tries))
            except RequestRefused as refused:
                # it may have been restarted without our noticing, and lost what the lasting request did
                if refused.status != 404 or self._lasting is None or replica.url in repeated:
                    raise _refused(refused, path, what) from None
                repeated.add(replica.url)
                replica.behind |= replica.told_at < now
        raise self._given_up(path, what, began, tries, self._replicas)

    def _get(self, path: str, replica: Replica) -> Answer:
        began, tries = time.monotonic(), 0
        while True:
            try:
                with replica.under_way():
                    return json_object(replica.send("GET", path))
            except Failed:
                tries += 1
                self._wait(tries, began, path, "a probe", [replica])
            except RequestRefused as refused:
                raise _refused(refused, path, "a probe") from None

    def _tell_round(self, path: str, payload: Answer, lasting: bool) -> bool:
        """Tells all replicas at once; whether any took it."""

        def tell(replica: Replica) -> RequestRefused | bool:
            try:
                with replica.under_way():
                    if lasting:
                        self._catch_up(replica)
                    else:
                        replica.send("POST", path, payload)
                return True
            except Failed:
                return False
            except RequestRefused as refused:
                return refused

        with ThreadPoolExecutor(len(self._replicas)) as executor:
            results = list(executor.map(tell, self._replicas))
        for result in results:
            if isinstance(result, RequestRefused):
                raise _refused(result, path, "the request to each of them")
        return any(results)

    def _catch_up(self, replica: Replica) -> None:
        """Repeats the lasting request to a replica that may not have it."""
        with replica.telling:
            told = self._lasting
            if told is not None and replica.behind:
                replica.send("POST", *told)
                with self._lock:
                    replica.behind = told is not self._lasting
                    replica.told_at = time.monotonic()

    def _take(self, deadline: float, avoid: Replica | None, stop: threading.Event) -> Replica | None:
        """The least busy replica that does not rest, rather not `avoid`; None if there is none before `deadline`."""
        while not stop.is_set():
            with self._lock:
                now = time.monotonic()
                awake = [replica for replica in self._replicas if replica.rests_until <= now]
                if now > deadline and avoid is not None:
                    return None
                if awake:
                    return min(awake, key=lambda replica: (replica is avoid, replica.busy, replica.asked))
                seconds = min(replica.rests_until for replica in self._replicas) - now
            if now + seconds > deadline:
                return None
            stop.wait(seconds)
        return None

    def _wait(self, tries: int, began: float, path: str, what: str, replicas: Sequence[Replica]) -> None:
        """Waits before another try; raises if there is no time for one."""
        seconds = backoff(tries)
        if time.monotonic() + seconds > began + self.timeout:
            raise self._given_up(path, what, began, tries, replicas)
        time.sleep(seconds)

    def _given_up(self, path: str, what: str, began: float, tries: int, replicas: Sequence[Replica]) -> ServerError:
        troubles = "; ".join(f"{replica.url}: {replica.trouble or 'not asked'}" for replica in replicas)
        return ServerError(
            f"No good answer to {path} ({what}) in {time.monotonic() - began:.0f} s (tries: {tries}). The last failure of "
            f"{troubles}. See whether the server runs and what its log says. If it only needs longer, to start or to answer, "
            f"raise vllm_server_timeout (now {self.timeout:g} s)."
        )


def _refused(refused: RequestRefused, path: str, what: str) -> RequestRefused:
    hint = f" Set the environment variable {API_KEY} to the server's key." if refused.status in (401, 403) else ""
    return RequestRefused(f"The request {path} ({what}) was refused, and would be again: {refused}.{hint}", refused.status)
