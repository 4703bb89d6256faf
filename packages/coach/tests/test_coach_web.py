"""The web page's server over HTTP."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest
from aiohttp import ClientSession
from fake_openai import call, last_role, make_calls, say
from served_page import served

from fitnesscoach import summary
from fitnesscoach.session import Session
from fitnesscoach.tools import tool_set
from fitnesscoach.web import MAX_SESSIONS, Sessions, serve
from portlab_spec.errors import UserError


async def coach(body, request):
    if last_role(body) == "tool":
        return await say(request, "Many <b>steps</b>.")
    return await make_calls(request, call("get_steps"))


async def hang(body, request):
    await asyncio.sleep(60)


def browse(data, scenario, script=coach):
    """Run a scenario(client, fake server, address) against a page over a scripted model."""

    async def main():
        async with served(script, data) as page, ClientSession() as client:
            await asyncio.wait_for(scenario(client, page.fake, page.url), 20)
        if left := asyncio.all_tasks() - {asyncio.current_task()}:  # what closes broken streams ends by itself
            _, left = await asyncio.wait(left, timeout=10)
        assert not left, left

    asyncio.run(main())


async def ask(client, at, question="Steps?", session="tab"):
    async with client.post(f"{at}/api/ask", json={"session": session, "question": question}) as response:
        assert response.status == 200
        return [json.loads(line) for line in (await response.text()).splitlines()]


def test_a_question_is_answered_step_by_step(data):
    async def scenario(client, fake, at):
        rows = await ask(client, at)
        assert [row["kind"] for row in rows][:2] == ["calls", "results"]
        assert rows[-1] == {"kind": "finish", "outcome": "answered", "answer": "Many <b>steps</b>.", "detail": ""}
        assert "".join(row["text"] for row in rows if row["kind"] == "text") == "Many <b>steps</b>."

    browse(data, scenario)


def test_each_tab_has_a_conversation_of_its_own(data):
    async def scenario(client, fake, at):
        await ask(client, at, session="one")
        await ask(client, at, session="two")
        assert len(fake.requests[2]["messages"]) == 2
        await ask(client, at, session="one")
        assert len(fake.requests[4]["messages"]) == 6
        async with client.post(f"{at}/api/reset", json={"session": "one"}) as response:
            assert response.status == 200
        await ask(client, at, session="one")
        assert len(fake.requests[6]["messages"]) == 2

    browse(data, scenario)


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script_but_its_own(data):
    async def scenario(client, fake, at):
        async with client.get(at) as response:
            page, policy = await response.text(), response.headers["Content-Security-Policy"]
        nonce = re.search(r"script-src 'nonce-([^']+)'", policy)[1]
        assert page.count(f'nonce="{nonce}"') == 2
        assert "{{" not in page
        assert "default-src 'none'" in policy
        assert "trusted-types 'none'" in policy
        assert not re.search(r"https?://|innerHTML|insertAdjacent|document\.write|\son[a-z]+=", page)
        async with client.get(at) as response:
            assert nonce not in await response.text()

    browse(data, scenario)


def test_the_page_is_told_about_model_data_and_tools(data):
    async def scenario(client, fake, at):
        async with client.get(f"{at}/api/about") as response:
            about = await response.json()
        assert (about["model"], about["data"], len(about["tools"])) == ("tuned", "sample", 7)
        assert "How long did I sleep last night?" in about["examples"]

    browse(data, scenario)


def test_the_page_is_told_what_was_recorded_today_without_asking_the_model(data):
    async def scenario(client, fake, at):
        async with client.get(f"{at}/api/today") as response:
            values = dict((await response.json())["values"])
        assert len(values) == 7
        assert values["Sleep"] == "7 h 05 min"
        assert not fake.requests

    browse(data, scenario)


def test_what_was_not_recorded_is_left_out(data):
    results = asyncio.run(summary.today(data))
    results[0] = replace(results[0], status="no_data", response={"error": "no steps were recorded today"})
    assert [label for label, _ in summary.recorded(results)][:2] == ["Daily step goal", "Goal reached"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_other_sites_cannot_ask(data, headers, status):
    async def scenario(client, fake, at):
        sent = {"Content-Type": "application/json", **headers}
        body = json.dumps({"session": "a", "question": "Steps?"})
        async with client.post(f"{at}/api/ask", data=body, headers=sent) as response:
            assert response.status == status
        assert not fake.requests

    browse(data, scenario)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ("{}", 400),
        ('{"session": "a", "question": 7}', 400),
        ('{"session": "", "question": "x"}', 400),
        ('{"session": "a", "question": "' + "x" * 1_000_000 + '"}', 413),
        ("[" * 50_000, 400),
    ],
)
def test_a_bad_request_is_answered_as_one(data, body, status):
    async def scenario(client, fake, at):
        headers = {"Content-Type": "application/json"}
        async with client.post(f"{at}/api/ask", data=body, headers=headers) as response:
            assert response.status == status
        assert not fake.requests

    browse(data, scenario)


def test_a_client_that_goes_away_ends_its_turn(data):
    async def scenario(client, fake, at):
        asking = asyncio.create_task(ask(client, at))
        while not fake.open:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for _ in range(100):
            if not fake.open:
                break
            await asyncio.sleep(0.02)
        assert fake.open == 0
        fake.script = coach
        assert (await ask(client, at))[-1]["outcome"] == "answered"

    browse(data, scenario, script=hang)


def test_a_second_question_of_a_tab_is_told_to_wait(data, monkeypatch):
    monkeypatch.setattr("fitnesscoach.web.STOPPING_SECONDS", 0.1)

    async def scenario(client, fake, at):
        asking = asyncio.create_task(ask(client, at))
        while not fake.open:
            await asyncio.sleep(0.01)
        async with client.post(f"{at}/api/ask", json={"session": "tab", "question": "x"}) as response:
            assert response.status == 409
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    browse(data, scenario, script=hang)


def test_a_question_right_after_a_stopped_one_is_answered(data):
    async def scenario(client, fake, at):
        asking = asyncio.create_task(ask(client, at))
        while not fake.open:
            await asyncio.sleep(0.01)
        fake.script = coach
        following = asyncio.create_task(ask(client, at))
        await asyncio.sleep(0.1)  # it has arrived before the first is stopped
        asking.cancel()
        assert (await following)[-1]["outcome"] == "answered"

    browse(data, scenario, script=hang)


def test_two_hundred_tabs_at_once_are_answered_or_told_to_wait(data):
    async def scenario(client, fake, at):
        async def one(i):
            async with client.post(f"{at}/api/ask", json={"session": str(i), "question": "x"}) as response:
                await response.read()
                return response.status

        statuses = await asyncio.gather(*(one(i) for i in range(200)))
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= MAX_SESSIONS

    browse(data, scenario)


def test_the_session_idle_longest_makes_room(data):
    made = []
    sessions = Sessions(lambda: made.append(1))
    first = sessions.get("0")
    for i in range(1, MAX_SESSIONS):
        sessions.get(str(i))
    assert sessions.get("0") is first
    sessions.get("new")
    assert len(sessions) == MAX_SESSIONS
    assert sessions.get("0") is first
    assert sessions.get("1") is not first
    assert len(made) == MAX_SESSIONS + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_serves_until_it_is_told_to_stop(number):
    args = [sys.executable, "-m", "fitnesscoach", "web", "--port", "0", "--endpoint", "http://127.0.0.1:9/v1"]
    process = subprocess.Popen([*args, "--model", "m"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+", process.stdout.readline())[0]
        with urllib.request.urlopen(address, timeout=10) as response:
            assert b"Fitness coach" in response.read()
        process.send_signal(number)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()


def test_a_port_that_is_taken_is_one_line(data):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="in use"):
        asyncio.run(serve(lambda: Session(None, tool_set("basic", data), data), "127.0.0.1", taken.getsockname()[1]))
