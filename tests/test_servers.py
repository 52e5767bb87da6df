"""Requests to vLLM servers: tried again where that may help, shared among replicas, with a key that nobody gets to see."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft import get_peft_model

from trl_opd.replica import Failed, Replica, http_client, parse_url
from trl_opd.servers import BadAnswer, RequestRefused, ServerError, Servers

from .fake_vllm import FakeVLLM
from .helpers import lora, make_model

PATH, LOAD = "/v1/completions", "/v1/load_lora_adapter"


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as fake:
        yield fake


@pytest.fixture
def other() -> Iterator[FakeVLLM]:
    with FakeVLLM() as fake:
        yield fake


def request(number: int = 0, **more: Any) -> dict[str, Any]:
    """Asks for a token after a prompt that tells the number."""
    return {"model": "base", "prompt": [5, 6, 7 + number], "max_tokens": 1, "return_token_ids": True, **more}


def last_id(answer: dict[str, Any]) -> int:
    """The last id of the prompt that was answered."""
    return answer["choices"][0]["prompt_token_ids"][-1]


def ask_all(servers: Servers, number: int = 12) -> None:
    """Asks so many, and checks that each answer is in its place."""
    found = servers.ask_all(PATH, [request(n) for n in range(number)], lambda n, answer: (n, last_id(answer)))
    assert found == [(n, 7 + n) for n in range(number)]


def asked(fake: FakeVLLM, path: str = PATH) -> int:
    return sum(found == path for found, _ in fake.requests)


def later(seconds: float, *functions: Callable[[], Any]) -> threading.Timer:
    """Calls functions after some time."""
    timer = threading.Timer(seconds, lambda: [function() for function in functions])
    timer.start()
    return timer


# ---- URLs


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("model", ["", "math-adapter", "Qwen/Qwen3-4B"])
def test_forms_of_a_url(end: str, model: str) -> None:
    fragment = f"#{model}" if model else ""
    assert parse_url(f"http://host:8000{end}{fragment}") == ("http://host:8000", model or None)
    assert parse_url(f"https://host/team/a{end}{fragment}") == ("https://host/team/a", model or None)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["host:8000"], "not the URL of a server"),
        (["http://:8000"], "not the URL of a server"),
        (["http://host:8000/v1?key=1"], "not the URL of a server"),
        ([], "empty"),
        (["http://a:1#x", "http://b:1#y"], "different models"),
        (["http://a:1#x", "http://b:1"], "different models"),
    ],
)
def test_urls_that_cannot_be_meant(urls: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Servers(urls, timeout=1)


@pytest.mark.parametrize("login", ["sesame", "me:sesame", ":sesame"])
def test_a_url_with_a_password_is_refused_and_not_repeated(login: str) -> None:
    with pytest.raises(ValueError, match="VLLM_API_KEY") as caught:
        Servers([f"http://{login}@host:8000"], timeout=1)
    assert "sesame" not in str(caught.value)


# ---- One server


def test_answers_are_in_order_and_the_bound_on_requests_holds(server: FakeVLLM) -> None:
    server.faults.seconds = 0.02
    ask_all(Servers([server.url], timeout=5, concurrency=3))
    assert server.most_at_once == 3


def test_nothing_is_asked_for_nothing(server: FakeVLLM) -> None:
    assert Servers([server.url], timeout=5).ask_all(PATH, [], lambda n, answer: n) == []


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_failure_that_may_pass_is_tried_again(server: FakeVLLM, status: int) -> None:
    server.faults.errors = [status, status]
    assert Servers([server.url], timeout=5).ask(PATH, request(), last_id) == 7
    assert asked(server) == 3


def test_an_answer_that_breaks_off_is_tried_again(server: FakeVLLM) -> None:
    server.faults.broken = 1
    assert Servers([server.url], timeout=5).ask(PATH, request(), last_id) == 7
    assert asked(server) == 2


@pytest.mark.parametrize("error", [BadAnswer("half of it is missing"), KeyError("choices"), IndexError(), TypeError()])
def test_an_answer_that_its_reader_does_not_take_is_tried_again(server: FakeVLLM, error: Exception) -> None:
    errors = [error]

    def read(answer: dict[str, Any]) -> int:
        if errors:
            raise errors.pop()
        return last_id(answer)

    assert Servers([server.url], timeout=5).ask(PATH, request(), read) == 7
    assert asked(server) == 2


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"model": "nobody"}, 404, "`nobody` does not exist"),
        ({"prompt": [5] * 128}, 400, "maximum context length is 128 tokens"),
    ],
)
def test_a_request_that_is_wrong_is_told_at_once(server: FakeVLLM, more: dict[str, Any], status: int, words: str) -> None:
    requests = [request(), request(1, **more), request(2)]
    with pytest.raises(RequestRefused, match=words) as caught:
        Servers([server.url], timeout=5).ask_all(PATH, requests, lambda n, answer: n, rows=[4, 17, 23])
    assert caught.value.status == status
    assert server.url in str(caught.value) and "row 17" in str(caught.value) and str(status) in str(caught.value)
    assert server.counts[status] == 1


def test_a_redirection_is_not_followed(server: FakeVLLM) -> None:
    """Where the key would go with it."""
    server.faults.errors = [302]
    with pytest.raises(RequestRefused, match="302"):
        Servers([server.url], timeout=5).ask(PATH, request(), last_id)


def test_the_last_error_says_what_was_asked_of_whom_and_for_how_long(server: FakeVLLM) -> None:
    server.faults.errors = [500] * 100
    began = time.monotonic()
    with pytest.raises(ServerError, match="vllm_server_timeout") as caught:
        Servers([server.url], timeout=0.6).ask_all(PATH, [request(), request()], lambda n, answer: n, rows=[3, 3])
    assert time.monotonic() - began < 2
    for part in (server.url, "500", "the engine is out of order", "row 3", PATH, "0.6 s"):
        assert part in str(caught.value), part
    assert not isinstance(caught.value, RequestRefused)


def test_the_other_requests_are_given_up_after_an_error(server: FakeVLLM) -> None:
    def read(number: int, answer: dict[str, Any]) -> int:
        raise BadAnswer("never good")  # so that it is tried again and again

    requests = [request(), request(model="nobody"), *(request(n) for n in range(12))]
    with pytest.raises(RequestRefused):
        Servers([server.url], timeout=5, concurrency=2).ask_all(PATH, requests, read)
    time.sleep(0.1)  # what is under way
    before = asked(server)
    time.sleep(0.5)
    assert asked(server) == before <= 4


def test_a_server_that_hangs_does_not_hold_up_for_ever(server: FakeVLLM) -> None:
    server.faults.seconds = 2
    began = time.monotonic()
    with pytest.raises(ServerError, match="no answer in time"):
        Servers([server.url], timeout=0.3).ask(PATH, request(), last_id)
    assert time.monotonic() - began < 1.5


def test_the_server_may_ask_to_be_left_alone(server: FakeVLLM) -> None:
    server.faults.errors, server.faults.retry_after = [503], 1
    began = time.monotonic()
    Servers([server.url], timeout=5).ask(PATH, request(), last_id)
    assert 1 <= time.monotonic() - began < 2.5


def test_a_server_that_is_killed_and_restarted_is_used_again(server: FakeVLLM, caplog: pytest.LogCaptureFixture) -> None:
    server.faults.seconds = 0.05
    timers = later(0.12, server.stop), later(0.5, server.start)
    ask_all(Servers([server.url], timeout=10, concurrency=2))
    assert all(not timer.is_alive() for timer in timers)
    told = [record.getMessage() for record in caplog.records if record.name == "trl_opd.replica"]
    assert len(told) == 2 and told[1] == f"{server.url} answers again."


def test_an_answer_from_before_a_failure_does_not_say_that_the_server_is_back() -> None:
    replica = Replica("http://host", http_client(1.0, 1), threading.Lock())
    with replica.under_way(), pytest.raises(Failed), replica.under_way():
        raise Failed("no connection")
    assert replica.failures == 1
    with replica.under_way():
        pass
    assert replica.failures == 0


def test_a_server_that_is_still_starting_is_waited_for() -> None:
    fake = FakeVLLM().start()
    fake.stop()
    timer = later(0.4, fake.start)
    assert Servers([fake.url], timeout=10).get("/version") == [{"version": "0.32.0"}]
    timer.join()
    fake.stop()
    with pytest.raises(ServerError, match="ConnectError") as caught:
        Servers([fake.url], timeout=0.3).get("/health")
    assert fake.url in str(caught.value)


def test_no_proxy_is_used(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Servers([server.url], timeout=0.5).ask(PATH, request(), last_id) == 7


# ---- The key


def test_the_key_is_sent_and_never_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with FakeVLLM(api_key="sesame") as server:
        servers = Servers([server.url], timeout=0.5)
        assert servers.ask(PATH, request(), last_id) == 7
        server.api_key = "another"
        with pytest.raises(RequestRefused, match=r"401.*VLLM_API_KEY") as refused:
            servers.ask(PATH, request(), last_id)
        server.stop()
        with pytest.raises(ServerError) as lost:
            servers.ask(PATH, request(), last_id)
    printed = "".join(capfd.readouterr())
    for text in (caplog.text, printed, repr(servers), str(vars(servers)), str(refused.value), str(lost.value)):
        assert "sesame" not in text


def test_a_server_that_repeats_the_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with FakeVLLM() as server, pytest.raises(RequestRefused, match=r"no model `\*\*\*`|`\*\*\*` does not exist"):
        Servers([server.url], timeout=1).ask(PATH, request(model="sesame"), last_id)


# ---- Replicas


def test_load_is_shared(server: FakeVLLM, other: FakeVLLM) -> None:
    server.faults.seconds = other.faults.seconds = 0.02
    ask_all(Servers([server.url, other.url], timeout=5, concurrency=4))
    assert asked(server) >= 4 and asked(other) >= 4


def test_the_slower_replica_gets_less(server: FakeVLLM, other: FakeVLLM) -> None:
    server.faults.seconds = 0.3
    ask_all(Servers([server.url, other.url], timeout=5, concurrency=4), number=20)
    assert asked(server) < asked(other) / 2


def test_one_of_two_replicas_dies_and_comes_back(server: FakeVLLM, other: FakeVLLM) -> None:
    servers = Servers([server.url, other.url], timeout=5, concurrency=4)
    server.stop()
    ask_all(servers)
    assert asked(other) == 12
    server.start()
    time.sleep(0.3)  # it rests
    server.faults.seconds = other.faults.seconds = 0.02
    ask_all(servers)
    assert asked(server) >= 4


def test_a_replica_that_hangs_is_left_for_another(server: FakeVLLM, other: FakeVLLM) -> None:
    server.faults.seconds = 9
    ask_all(Servers([server.url, other.url], timeout=3, concurrency=2), number=4)
    assert asked(other) == 4


def test_a_replica_that_answers_nonsense_is_left_for_another(server: FakeVLLM, other: FakeVLLM) -> None:
    server.faults.broken = 100
    ask_all(Servers([server.url, other.url], timeout=5, concurrency=4))
    assert asked(server) <= 6  # it is idle, but it rests


def test_the_same_url_twice_is_one_replica(server: FakeVLLM) -> None:
    assert len(Servers([server.url, f"{server.url}/v1/"], timeout=5).get("/health")) == 1


# ---- Requests that each replica must have had


@pytest.fixture
def adapter(tmp_path: Path) -> dict[str, Any]:
    """A request to load an adapter of the model that is served."""
    get_peft_model(make_model(0), lora()).save_pretrained(str(tmp_path))  # type: ignore[arg-type]
    return {"lora_name": "v1", "lora_path": str(tmp_path), "load_inplace": True}


def test_each_replica_is_told(server: FakeVLLM, other: FakeVLLM, adapter: dict[str, Any]) -> None:
    servers = Servers([server.url, other.url], timeout=5)
    servers.tell_each(LOAD, adapter)
    assert asked(server, LOAD) == asked(other, LOAD) == 1
    servers.tell_each("/v1/unload_lora_adapter", {"lora_name": "v1"})
    with pytest.raises(RequestRefused, match="404"):
        servers.tell_each("/v1/unload_lora_adapter", {"lora_name": "v1"})


def test_a_replica_that_missed_a_lasting_request_gets_it_before_any_other(
    server: FakeVLLM, other: FakeVLLM, adapter: dict[str, Any]
) -> None:
    servers = Servers([server.url, other.url], timeout=5, concurrency=4)
    server.stop()
    servers.tell_each(LOAD, adapter, lasting=True)
    server.start()
    time.sleep(0.3)
    server.faults.seconds = other.faults.seconds = 0.02
    requests = [request(n, model="v1") for n in range(12)]
    servers.ask_all(PATH, requests, lambda n, answer: n)
    assert server.requests[0][0] == LOAD and asked(server, LOAD) == 1 and asked(server) >= 3
    assert server.counts[404] == 0


def test_a_restart_that_nobody_noticed_costs_one_more_request(server: FakeVLLM, adapter: dict[str, Any]) -> None:
    servers = Servers([server.url], timeout=5, concurrency=8)
    servers.tell_each(LOAD, adapter, lasting=True)
    server.stop()
    server.start()
    servers.ask_all(PATH, [request(n, model="v1") for n in range(8)], lambda n, answer: n)
    assert asked(server, LOAD) == 2
    with pytest.raises(RequestRefused, match="`v2` does not exist"):
        servers.ask(PATH, request(model="v2"), last_id)


def test_all_replicas_may_be_down_for_a_while(server: FakeVLLM, adapter: dict[str, Any]) -> None:
    server.stop()
    timer = later(0.4, server.start)
    Servers([server.url], timeout=5).tell_each(LOAD, adapter, lasting=True)
    assert "v1" in server.adapters
    timer.join()
    server.stop()
    with pytest.raises(ServerError, match="ConnectError"):
        Servers([server.url], timeout=0.3).tell_each(LOAD, adapter, lasting=True)


def test_a_lasting_request_that_is_refused_is_told_at_once(server: FakeVLLM, adapter: dict[str, Any]) -> None:
    servers = Servers([server.url], timeout=5)
    server.faults.errors, server.faults.errors_of = [404] * 100, LOAD
    with pytest.raises(RequestRefused, match="404"):
        servers.tell_each(LOAD, adapter, lasting=True)
    with pytest.raises(RequestRefused, match="404"):
        servers.ask(PATH, request(model="v1"), last_id)
    assert asked(server, LOAD) <= 4


def test_unknown_paths_are_refused(server: FakeVLLM) -> None:
    with pytest.raises(RequestRefused, match="Not Found"):
        Servers([server.url], timeout=5).get("/nothing")
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
