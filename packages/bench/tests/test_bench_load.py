"""The load generator against a server whose delays are known, in another process."""

import asyncio
import gc
import time

import numpy as np
import pytest
from mock_process import log_of, mock_server, request_body

from portlab_bench import metrics
from portlab_bench.load.arrivals import read_trace, schedule
from portlab_bench.load.client import Client, Target
from portlab_bench.load.drive import drive
from portlab_spec.errors import UserError


def bodies(count: int, **more) -> list[bytes]:
    return [request_body(i, **more) for i in range(count)]


def true_records(records, log, start):
    """The same requests with the times at which the server sent each event."""
    return [r.model_copy(update={"chunks": tuple(t - start for t in log[str(r.index)]["events"])}) for r in records]


def test_figures_at_500_requests_a_second_are_those_of_the_server():
    """Medians and means. On an idle machine they agree to 1 ms or 1 % (`nox -s bench_load`); tests share theirs."""
    faults: list[str] = []
    with mock_server("--ttft", "60ms", "--itl", "8ms", "--jitter", "0.3", "--tokens", "8") as url:
        for _ in range(3):
            times = schedule("poisson", 500, 2.0, 0)
            outcome = drive(Target.parse(url), bodies(len(times)), times=times)
            log = log_of(url)
            measured = metrics.figures(outcome.records)
            truth = metrics.figures(true_records(outcome.records, log, outcome.start))
            assert measured.outcomes == {"ok": len(times)}
            assert measured.output_tokens == 8 * len(times)
            faults = []
            for name in ("ttft", "tpot", "itl", "e2e", "normalised"):
                seen, real = getattr(measured, name), getattr(truth, name)
                for what, a, b in (
                    ("mean", seen.mean, real.mean),
                    ("p50", seen.quantiles["p50"].value, real.quantiles["p50"].value),
                ):
                    if abs(a - b) > max(5e-3, 0.05 * b):
                        faults.append(f"{name} {what}: {a} for {b}")
            if abs(measured.output_throughput / truth.output_throughput - 1) > 0.02:
                faults.append("throughput")
            if not faults:
                break
    assert not faults


def test_requests_are_sent_when_due_whatever_the_server_does():
    """Coordinated omission: a server that answers one at a time, and slowly, delays no sending."""
    with mock_server("--ttft", "100ms", "--tokens", "1", "--slots", "1") as url:
        times = schedule("constant", 20, 1.0, 0)
        outcome = drive(Target.parse(url), bodies(len(times)), times=times)
    lag = np.array([r.sent - r.scheduled for r in outcome.records])
    waits = [metrics.ttft(r) for r in outcome.records]
    assert np.median(lag) < 0.02
    # Twenty requests in one second, ten a second answered: the last waits about a second longer than the first.
    assert waits[-1] - waits[0] > 0.7


def test_getting_ready_takes_no_time_from_the_requests(monkeypatch):
    """A program that holds much takes seconds to collect its garbage."""
    monkeypatch.setattr(gc, "collect", lambda: time.sleep(1))
    with mock_server("--ttft", "1ms", "--tokens", "1") as url:
        outcome = drive(Target.parse(url), bodies(20), times=np.arange(20) / 40)
    assert np.median([r.sent - r.scheduled for r in outcome.records]) < 0.02
    assert outcome.load < 0.9


def test_a_closed_loop_keeps_so_many_under_way():
    with mock_server("--ttft", "50ms", "--itl", "1ms", "--tokens", "2") as url:
        outcome = drive(Target.parse(url), bodies(1000), concurrency=4, seconds=1.0)
        started = [(r.sent, 1) for r in outcome.records] + [(r.done, -1) for r in outcome.records]
    under_way = np.cumsum([step for _, step in sorted(started)])
    assert under_way.max() == 4
    assert 40 <= len(outcome.records) <= 84  # 4 x 1 s / 51 ms = 78 on an idle machine
    assert all(r.scheduled is None for r in outcome.records)


def test_a_closed_loop_ends_where_its_requests_do():
    with mock_server("--ttft", "1ms", "--tokens", "1") as url:
        outcome = drive(Target.parse(url), bodies(5), concurrency=8, seconds=30.0)
    assert len(outcome.records) == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_a_closed_loop_that_outruns_its_list_makes_more(processes):
    with mock_server("--ttft", "1ms", "--tokens", "1") as url:
        target, made = Target.parse(url), bodies(4)
        outcome = drive(target, made, more=request_body, concurrency=2, seconds=0.5, processes=processes)
        sent = {int(i) for i in log_of(url)}
    assert len(outcome.records) > 20
    assert sent == {r.index for r in outcome.records}
    assert sorted(sent) == sorted(set(sent))


def test_several_processes_share_the_requests_and_the_clock():
    with mock_server("--ttft", "20ms", "--tokens", "2") as url:
        times = schedule("constant", 50, 1.0, 0)
        outcome = drive(Target.parse(url), bodies(len(times)), times=times, processes=2)
    assert [r.index for r in outcome.records] == list(range(50))
    assert [r.scheduled for r in outcome.records] == times.tolist()
    assert all(r.outcome == "ok" for r in outcome.records)
    assert np.median([r.sent - r.scheduled for r in outcome.records]) < 0.02


def test_what_was_sent_before_the_measurement_is_marked():
    with mock_server("--ttft", "1ms", "--tokens", "1") as url:
        outcome = drive(Target.parse(url), bodies(10), times=np.arange(10) / 20, warm_up=0.25)
    assert [r.warm_up for r in outcome.records] == [True] * 5 + [False] * 5
    assert metrics.figures(outcome.records).requests == 5


def test_failures_are_told_apart():
    with mock_server("--ttft", "1ms", "--itl", "1ms", "--tokens", "4", "--fail-every", "4", "--drop-every", "6") as url:
        outcome = drive(Target.parse(url), bodies(12), times=np.arange(12) / 50)
    found = [r.outcome for r in sorted(outcome.records, key=lambda r: r.sent)]
    assert found.count("http_error") == 3
    assert found.count("broken") == 1  # the sixth; the twelfth has failed before
    (failed, *_) = [r for r in outcome.records if r.outcome == "http_error"]
    assert failed.error == 'status 500: {"error": {"message": "as asked"}}'
    (broken,) = [r for r in outcome.records if r.outcome == "broken"]
    assert (len(broken.chunks), broken.output_tokens) == (2, 2)


def test_a_request_that_takes_too_long_is_given_up_and_its_connection_too():
    with mock_server("--ttft", "1s", "--tokens", "1") as url:
        outcome = drive(Target.parse(url), bodies(2), times=np.zeros(2), timeout=0.2)
        assert all(r.done - r.sent < 0.9 for r in outcome.records)
        assert [r.outcome for r in outcome.records] == ["timeout"] * 2
        again = drive(Target.parse(url), bodies(1), times=np.zeros(1))
    assert again.records[0].outcome == "ok"


def test_a_server_that_is_not_there_is_a_failure_of_each_request():
    outcome = drive(Target.parse("http://127.0.0.1:9"), bodies(3), times=np.zeros(3))
    assert {r.outcome for r in outcome.records} == {"broken"}
    assert "cannot connect" in outcome.records[0].error
    assert metrics.figures(outcome.records) is None


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "broken"),  # no event at all
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": "x"}}]}\n\n', "broken"),  # no [DONE]
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {oops\n\ndata: [DONE]\n\n", "malformed"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "m"}}\n\ndata: [DONE]\n\n', "server_error"),
        (b"what is this\r\n\r\n", "broken"),
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nwait", "http_error"),
        (b"", "broken"),
    ],
)
def test_servers_that_answer_badly(answer, outcome):
    async def main():
        async def serve(reader, writer):
            await reader.read(100)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 5)
        record = await client.send(b"{}", 0, time.monotonic())
        server.close()
        return record

    record = asyncio.run(main())
    assert record.outcome == outcome
    assert record.error
    assert record.done is not None


def test_connections_are_kept():
    with mock_server("--ttft", "1ms", "--tokens", "1") as url:

        async def main():
            client = Client(Target.parse(url))
            for i in range(5):
                assert (await client.send(bodies(1)[0], i, 0.0)).outcome == "ok"
            assert len(client._idle) == 1
            await client.close()

        asyncio.run(main())


def test_reasoning_and_calls_count_as_tokens():
    for kind in ("reasoning", "calls"):
        with mock_server("--ttft", "1ms", "--itl", "1ms", "--tokens", "3", "--kind", kind, "--no-usage") as url:
            (record,) = drive(Target.parse(url), bodies(1), times=np.zeros(1)).records
        assert (record.kinds, record.output_tokens, record.tokens_from) == ({kind: 3}, 3, "chunks")


def test_events_of_several_tokens_are_counted_by_the_server():
    with mock_server("--ttft", "1ms", "--itl", "1ms", "--tokens", "6", "--burst", "3") as url:
        (record,) = drive(Target.parse(url), bodies(1), times=np.zeros(1)).records
    assert (len(record.chunks), record.output_tokens, record.tokens_from) == (2, 6, "usage")


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://h:8000", "h:8000/v1/chat/completions"),
        ("https://h/v1/", "h:443/v1/chat/completions"),
        ("http://h/a/chat/completions", "h:80/a/chat/completions"),
        ("http://[::1]:3", "::1:3/v1/chat/completions"),
    ],
)
def test_addresses(url, where):
    target = Target.parse(url)
    assert f"{target.host}:{target.port}{target.path}" == where
    assert target.tls is url.startswith("https")
    host = where.split("/")[0].replace("::1", "[::1]")
    assert f"\r\nHost: {host}\r\n".encode() in target.request(b"")


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http://h:99999"])
def test_what_is_no_address(url):
    with pytest.raises(UserError, match="is no address of a server"):
        Target.parse(url)


def test_a_header_cannot_smuggle_another():
    with pytest.raises(UserError, match="line end"):
        Target.parse("http://h", {"X": "a\r\nY: b"}).request(b"")


def test_poisson_arrivals_are_poisson():
    times = schedule("poisson", 100, 100.0, 3)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, abs=4 * 100)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert np.array_equal(times, schedule("poisson", 100, 100.0, 3))
    assert not np.array_equal(times[:100], schedule("poisson", 100, 100.0, 4)[:100])
    assert 0 <= times[0] < times[-1] < 100


def test_constant_arrivals():
    assert schedule("constant", 4, 1.0, 0).tolist() == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0), (float("inf"), 1)])
def test_a_load_that_is_none(rate, seconds):
    with pytest.raises(UserError, match="is none"):
        schedule("poisson", rate, seconds, 0)


def test_traces(tmp_path):
    path = tmp_path / "trace"
    path.write_text("# times\n0\n0.5\n\n0.5 # twice\n2e0\n")
    assert read_trace(path).tolist() == [0, 0.5, 0.5, 2]
    for text, message in (("", "has no times"), ("1\nx", "line 2"), ("2\n1", "line 2"), ("nan", "line 1"), ("-1", "1")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_trace(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "nothing")
