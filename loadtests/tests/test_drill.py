"""A drill's client on real sockets, and a whole drill in small: real processes, real Locust."""

import json
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests.drill import load
from loadtests.drill.answers import Answer, End
from loadtests.drill.asking import Client
from loadtests.drill.mixes import Request
from loadtests.drill.plan import Drill
from loadtests.drill.run import run
from loadtests.simunit.process import SimUnit

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n'
REQUEST = Request("short-chat", " Why?", 2, 12)


@contextmanager
def server(
    *replies: bytes, close: bool = True, on_closed: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Answers each connection's first request with the next of these bytes, and closes it or does not."""
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                read_request(connection)
                connection.sendall(reply)
                if close:
                    connection.close()
                    on_closed()
                else:
                    kept.append(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
        for connection in kept:
            connection.close()


def read_request(connection: socket.socket) -> None:
    """To its last byte: whoever closes with something unread resets the connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def first_token() -> bytes:
    text = REQUEST.expected()
    assert text is not None
    return chunk(EVENT % text[:5].encode())


def asked(url: str, *, hang_s: float = 5.0) -> Answer:
    client, answer = Client(url, "sim", hang_s), Answer(REQUEST)
    client.ask(answer)
    client.close()
    return answer


def test_a_chunked_body_that_is_cut_is_no_end() -> None:
    with server(CHUNKED + first_token()) as url:
        answer = asked(url)
    assert answer.tokens == 1
    assert answer.end()[0] is End.LOST
    assert "IncompleteRead" in answer.cut


def test_a_cut_in_the_middle_of_a_chunk_is_one_too() -> None:
    with server(CHUNKED + first_token() + b"40\r\ndata: {") as url:
        assert asked(url).end()[0] is End.LOST


def test_a_stream_that_stands_still_hangs() -> None:
    with server(CHUNKED + first_token(), close=False) as url:
        assert asked(url, hang_s=0.3).end()[0] is End.HUNG


def test_an_error_event_with_a_clean_end_is_one() -> None:
    error = chunk(b'data: {"error": {"message": "it broke"}}\n\n')
    with server(CHUNKED + first_token() + error + b"0\r\n\r\n") as url:
        assert asked(url).end()[0] is End.ERROR_EVENT


def test_nobody_there_is_a_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert asked(f"http://127.0.0.1:{port}").end()[0] is End.LOST


def test_a_connection_that_the_other_side_has_closed_is_not_used_again() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"
    closed = threading.Semaphore(0)
    with server(refusal, refusal, on_closed=closed.release) as url:
        client = Client(url, "sim", 5.0)
        for _ in range(2):
            answer = Answer(REQUEST)
            client.ask(answer)
            assert answer.end()[0] is End.REFUSED
            # A request that meets the close on its way is lost: what is asked before it is another matter.
            assert closed.acquire(timeout=5.0)
        client.close()


@pytest.mark.parametrize("mix", ["short-chat", "rag", "batch", "embeddings"])
def test_a_simulated_unit_answers_each_mix_as_it_must(mix: str) -> None:
    with SimUnit.start("a", step_ms=1) as unit:
        client, answer = Client(unit.url, "sim", 5.0), Answer(Request.draw(mix, random.Random(1)))
        client.ask(answer)
        client.close()
    assert answer.end() == (End.WHOLE, "")


@pytest.mark.parametrize(
    "mix", [{"long-prompt": 2}, {"stream-48": 1}, {"rag": 1, "batch": 3, "long-prompt": 2}]
)
def test_locust_shares_the_streams_out_as_the_file_says(mix: dict[str, int], tmp_path: Path) -> None:
    streams = 2 * sum(mix.values())
    drill = Drill.model_validate(
        {"name": "d", "load": {"mix": mix, "streams": streams, "seconds": 1}, "promises": {"lost": 0}}
    )
    command = [*load.command(drill, "http://127.0.0.1:1", tmp_path), "--show-task-ratio-json"]
    shown = subprocess.run(command, cwd=load.ROOT, capture_output=True, check=True).stdout
    shares = json.loads(shown[shown.index(b"{") :])["per_class"]
    wanted = {load.user_class(name): weight / sum(mix.values()) for name, weight in mix.items()}
    assert {name: user["ratio"] for name, user in shares.items()} == pytest.approx(wanted)


def test_a_small_drill_kills_a_leader_and_accounts_for_every_request(tmp_path: Path) -> None:
    drill = Drill.model_validate(
        {
            "name": "small",
            "topology": {"cells": 1, "units": 2, "timing": {"step_ms": 10}},
            "load": {"mix": {"short-chat": 3, "batch": 1}, "streams": 8, "seconds": 5},
            "faults": [{"at_s": 1, "fault": "kill", "target": "a1.leader", "heal_after_s": 1.5}],
            "promises": {"lost": 0, "hung": 0, "repeated": 0, "wrong": 0, "flips": 0, "detection_s": 2},
        }
    )
    result = run(drill, tmp_path)
    assert [verdict.line() for verdict in result.verdicts if not verdict.kept] == []
    assert [blow.what for blow in result.outcome.blows] == ["kill a1.leader"]
    assert len(result.outcome.summary.records) > 20
    assert "Locust" in (tmp_path / "locust.html").read_text()
