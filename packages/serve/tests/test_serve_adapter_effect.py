"""Whether an adapter moves the log probabilities, asked of a server that is made up."""

import json

import httpx
import pytest

from portlab_serve.adapter_effect import measure, require_effect, wait_until_healthy
from portlab_spec.errors import CheckFailed, UserError


class Server:
    """Answers with the log probabilities of each model in turn."""

    def __init__(self, **answers: list[float]) -> None:
        self.answers, self.bodies = {name: list(values) for name, values in answers.items()}, []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        value = self.answers[body["model"]].pop(0)
        logprobs = {"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5, "x": -1.0}, {"b": value, "x": -2.0}]}
        return httpx.Response(200, json={"choices": [{"logprobs": logprobs}]})

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self), base_url="http://server")


def test_an_adapter_that_moves_them_has_an_effect():
    (effect,) = measure(Server(base=[-1.0, -1.0], a=[-1.25]).client, "base", ["a"])
    assert (effect.difference, effect.noise, effect.is_seen) == (0.25, 0.0, True)
    require_effect([effect])


def test_an_adapter_that_changes_nothing_is_refused():
    effects = measure(Server(base=[-1.0, -1.0], a=[-1.5], b=[-1.0]).client, "base", ["a", "b"])
    with pytest.raises(CheckFailed, match="adapter b changes nothing"):
        require_effect(effects)


def test_what_is_within_the_bases_own_noise_is_no_effect():
    (effect,) = measure(Server(base=[-1.0, -1.2], a=[-1.1]).client, "base", ["a"])
    assert not effect.is_seen


def test_requests_are_greedy():
    server = Server(base=[-1.0, -1.0], a=[-1.0])
    measure(server.client, "base", ["a"])
    assert {body["temperature"] for body in server.bodies} == {0}


def test_places_behind_a_different_token_are_not_compared():
    def answer(request: httpx.Request) -> httpx.Response:
        adapted = json.loads(request.content)["model"] == "a"
        tokens = ["x" if adapted else "a", "b"]
        top = [{"a": -0.5, "x": -0.4 if adapted else -1.0}, {"b": -9.0 if adapted else -1.0}]
        return httpx.Response(200, json={"choices": [{"logprobs": {"tokens": tokens, "top_logprobs": top}}]})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    assert measure(client, "base", ["a"])[0].difference == pytest.approx(0.6)


def test_a_refused_request_is_said():
    client = httpx.Client(
        transport=httpx.MockTransport(lambda request: httpx.Response(404, text="no such model")), base_url="http://s"
    )
    with pytest.raises(UserError, match="answers 404: no such model"):
        measure(client, "base", ["a"])


def test_health_is_waited_for():
    answers = iter([httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200)])

    def answer(request: httpx.Request) -> httpx.Response:
        held = next(answers)
        if isinstance(held, Exception):
            raise held
        return held

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    assert wait_until_healthy(client, lambda: True, interval=0)


def test_a_server_that_ended_is_not_waited_for():
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(503)), base_url="http://server")
    alive = iter([True, False])
    assert not wait_until_healthy(client, lambda: next(alive), interval=0)
