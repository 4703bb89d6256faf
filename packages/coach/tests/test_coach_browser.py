"""The web page in a real browser, wherever a Chromium is found."""

import asyncio
import json

import chromium
import pytest
from fake_openai import call, chunk, last_role, make_calls, say, stream
from served_page import served

pytestmark = chromium.needed()

IDLE = "document.querySelector('#send').textContent === 'Ask'"
OVER = f"{IDLE} && document.querySelector('article')"
ANSWERED = f"{IDLE} && document.querySelector('article:last-of-type .coach')"
FIELD = "document.querySelector('#question').value"
IN_FIELD = "document.activeElement.id === 'question'"
HOSTILE = "<script>window.ran = 1</script><img src=nowhere onerror='window.ran = 2'> &amp; [x](javascript:ran=3)"


@pytest.fixture(scope="module")
def browser_at(tmp_path_factory):
    with chromium.running(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.fixture
def browse(browser_at, data):
    """Run a scenario(page, site) on a page over a scripted model. Nothing may go wrong on it but what is expected."""

    def run(scenario, script, *, tools="basic", width=1000, height=700, expected=()):
        async def main():
            async with served(script, data, tools) as site, chromium.connected(browser_at) as browser:
                page = await browser.open(site.url, width, height)
                await asyncio.wait_for(scenario(page, site), 60)
                assert [problem for problem in page.problems if not any(e in problem for e in expected)] == []
                assert [r for r in page.requests if not r.startswith((site.url, "data:"))] == []

        asyncio.run(main())

    return run


async def coach(body, request):
    if last_role(body) == "tool":
        return await say(request, "Many steps.")
    return await make_calls(request, call("get_steps"))


async def hang(body, request):
    await asyncio.sleep(60)


def saying(text):
    async def script(body, request):
        return await say(request, text)

    return script


class HalfWay:
    """Says half of an answer, and the rest when it is told to."""

    def __init__(self):
        self.go_on = asyncio.Event()

    async def __call__(self, body, request):
        response = await stream(request, chunk(content="Half of"), done=False)
        await self.go_on.wait()
        for piece in (chunk(content=" an answer."), chunk("stop")):
            await response.write(f"data: {json.dumps(piece)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def ask(page, question="Steps?", until=ANSWERED):
    await page.until(IN_FIELD)  # where the focus begins, and stays
    await page.type(question)
    await page.press("Enter")
    await page.until(until)


async def parts(page, selector):
    """The texts of all elements that a selector finds."""
    return await page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.textContent)")


def asked(fake):
    """The questions that the model was asked last."""
    return [message["content"] for message in fake.requests[-1]["messages"] if message["role"] == "user"]


# ----------------------------------------------------------------------------------------------- a conversation


def test_an_empty_page_shows_the_day_and_what_one_may_ask(browse):
    async def scenario(page, site):
        await page.until("document.querySelectorAll('dd').length === 7 && document.querySelector('#examples button')")
        assert "7 h 05 min" in await parts(page, "dd")
        assert await parts(page, "#about") == ["tuned, data: sample, 7 tools"]
        await page.until(IN_FIELD)
        await page.click("#examples button")
        await page.until(ANSWERED)
        assert asked(site.fake) == ["How many steps have I walked today?"]
        assert await page.run(f"document.querySelector('#start').hidden && {IN_FIELD}")

    browse(scenario, coach)


def test_an_answer_appears_while_it_is_being_given(browse):
    script = HalfWay()

    async def scenario(page, site):
        await ask(page, until="document.querySelector('.coach')?.textContent === 'Half of'")
        assert await parts(page, "#send") == ["Stop"]
        script.go_on.set()
        await page.until(IDLE)
        assert await parts(page, ".coach") == ["Half of an answer."]

    browse(scenario, script)


def test_a_call_is_shown_with_its_arguments_and_its_result_before_the_answer(browse):
    async def script(body, request):
        if last_role(body) == "tool":
            return await say(request, "Many.")
        both = call("get_steps", {"date": "2026-05-12"}), call("get_sleep", {"date": "soon"}, index=1)
        return await make_calls(request, *both)

    async def scenario(page, site):
        await ask(page)
        steps, sleep, answer = await parts(page, "article > div")
        assert steps.startswith('→ get_steps(date="2026-05-12")← {"date":"2026-05-12","steps":')
        assert sleep.startswith('→ get_sleep(date="soon")← refused: ')
        assert answer == "Many."
        assert len(await parts(page, ".error")) == 1

    browse(scenario, script, tools="plus")


def test_enter_sends_and_shift_with_it_starts_a_line(browse):
    async def scenario(page, site):
        await page.until(IN_FIELD)
        await page.press("Enter")  # nothing is asked
        await page.type("One")
        await page.press("Enter", shift=True)
        await ask(page, "two?")
        assert asked(site.fake) == ["One\ntwo?"]
        assert await page.run(FIELD) == ""
        assert len(site.fake.requests) == 2

    browse(scenario, coach)


def test_escape_stops_an_answer_and_the_next_question_can_be_asked_at_once(browse):
    async def scenario(page, site):
        await ask(page, until="document.querySelector('.coach')")
        site.fake.script = coach
        await page.press("Escape")
        await ask(page, "Again?", until="document.querySelectorAll('article').length === 2")
        await page.until(ANSWERED)
        assert await parts(page, "article:first-of-type > div") == ["Half of", "stopped"]
        assert asked(site.fake) == ["Again?"]
        assert site.fake.open == 0

    browse(scenario, HalfWay())


def test_a_clock_runs_while_nothing_comes_and_the_button_stops_too(browse):
    async def scenario(page, site):
        await ask(page, until="document.querySelector('.wait')?.textContent === '… 1 s'")
        await page.click("#send")
        await page.until(IDLE)
        assert await parts(page, "article > div") == ["stopped"]
        assert await page.run(IN_FIELD)

    browse(scenario, hang)


def test_a_question_typed_meanwhile_waits_for_its_enter(browse):
    script = HalfWay()

    async def scenario(page, site):
        await ask(page, until="document.querySelector('.coach')")
        await page.type("And then?")
        await page.press("Enter")
        script.go_on.set()
        await page.until(IDLE)
        assert await page.run(FIELD) == "And then?"
        assert len(site.fake.requests) == 1
        await page.press("Enter")
        await page.until("document.querySelectorAll('.coach').length === 2")
        assert asked(site.fake) == ["Steps?", "And then?"]

    browse(scenario, script)


def test_two_tabs_are_two_conversations_and_loading_again_begins_one(browse):
    async def scenario(page, site):
        other = await page.browser.open(site.url)
        for tab, question in ((page, "One?"), (other, "Two?"), (page, "Three?")):
            await ask(tab, question)
        assert asked(site.fake) == ["One?", "Three?"]
        await page.go()
        assert await parts(page, "article") == []
        await ask(page, "Four?")
        assert asked(site.fake) == ["Four?"]
        await ask(other, "Five?")
        assert asked(site.fake) == ["Two?", "Five?"]
        assert other.problems == []

    browse(scenario, coach)


def test_a_new_conversation_forgets_the_old_one_even_in_the_middle_of_an_answer(browse):
    async def scenario(page, site):
        await ask(page, "Old?")
        site.fake.script = HalfWay()
        await ask(page, "Older?", until="document.querySelectorAll('.coach').length === 2")
        site.fake.script = coach
        await page.click("#reset")
        await page.until("!document.querySelector('article') && !document.querySelector('#start').hidden")
        assert await page.run(IN_FIELD)
        await ask(page, "New?")
        assert asked(site.fake) == ["New?"]

    browse(scenario, coach)


# --------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("where", ["question", "answer", "argument", "name", "fault"])
def test_markup_is_shown_as_it_is_written(browse, where):
    async def script(body, request):
        if where == "fault":
            return await stream(request, {"error": {"message": HOSTILE}})
        if where in ("argument", "name") and last_role(body) == "user":
            return await make_calls(request, call(HOSTILE if where == "name" else "get_steps", {"x": HOSTILE}))
        return await say(request, HOSTILE if where == "answer" else "Done.")

    async def scenario(page, site):
        await ask(page, HOSTILE if where == "question" else "Steps?", until=OVER)
        shown = await page.run("document.querySelector('#log').textContent")
        assert "<img src=nowhere onerror='window.ran = 2'>" in shown
        assert await page.run("document.querySelectorAll('main :is(script, img, a)').length") == 0
        assert await page.run("typeof window.ran") == "undefined"

    browse(scenario, script)


INJECTIONS = {
    "markup": "document.querySelector('#log').innerHTML = \"<img src='data:,' onerror='window.ran = 1'>\"",
    "script": "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))",
    "handler": "document.querySelector('#log').setAttribute('onclick', 'window.ran = 1'),"
    "document.querySelector('#log').click()",
    "address": "location.href = 'javascript:void(window.ran = 1)'",
}


@pytest.mark.parametrize("way", INJECTIONS)
def test_even_a_mistake_of_the_page_could_not_make_a_script_of_text(browse, way):
    attempt = f"(() => {{ try {{ {INJECTIONS[way]} }} catch (error) {{}} }})()"

    async def scenario(page, site):
        bare = await page.browser.open("data:text/html,<main id=log>")
        await page.run(attempt)
        await bare.run(attempt)
        await bare.until("window.ran")  # where nothing forbids it, it runs
        assert await page.run("typeof window.ran") == "undefined"

    browse(scenario, coach, expected=("Content Security Policy", "Trusted"))


def test_a_model_that_cannot_be_asked_is_one_line_and_the_page_goes_on(browse):
    async def failing(body, request):
        return await stream(request, {"error": {"message": "engine died"}})

    async def scenario(page, site):
        await ask(page, until=OVER)
        assert await parts(page, "article > div") == ["tuned: the server reports: engine died"]
        site.fake.script = coach
        await ask(page)
        assert await parts(page, "article:last-of-type .coach") == ["Many steps."]

    browse(scenario, failing)


def test_a_coach_that_is_gone_is_one_line_and_the_question_can_be_sent_again(browse):
    async def scenario(page, site):
        await page.until("document.querySelector('dd')")
        await site.stop()
        await ask(page, "Still there?", until=f"{IDLE} && document.querySelector('.detail')")
        assert await parts(page, "article > div") == ["The coach does not answer. Is it still running?"]
        assert await page.run(FIELD) == "Still there?"
        await site.start()
        await page.press("Enter")
        await page.until(ANSWERED)
        assert asked(site.fake) == ["Still there?"]

    browse(scenario, coach, expected=("net::ERR_CONNECTION_REFUSED",))


def test_a_coach_that_goes_away_in_the_middle_keeps_what_was_said(browse):
    async def scenario(page, site):
        await ask(page, until="document.querySelector('.coach')")
        await site.stop()
        await page.until(IDLE)
        said, fault = await parts(page, "article > div")
        assert said == "Half of"
        assert fault in (
            "The connection ended in the middle of the answer.",
            "The coach does not answer. Is it still running?",
        )
        await site.start()

    browse(scenario, HalfWay(), expected=("net::ERR_",))


def test_a_refused_question_is_back_in_the_field(browse):
    async def scenario(page, site):
        long = "x" * 8_001
        await ask(page, long, until=f"{IDLE} && document.querySelector('.detail')")
        assert await parts(page, ".detail") == ["the question has 8,001 characters, at most 8,000 are taken"]
        assert await page.run(FIELD) == long

    browse(scenario, coach)


# ------------------------------------------------------------------------------------------------ how it looks


@pytest.mark.parametrize("width", [320, 360, 768, 1920])
def test_nothing_is_wider_than_the_window(browse, width):
    text = f"{'x' * 2_000} שלום עולם, مرحبا {'🏃🏽‍♀️' * 200} " + "word " * 200 + "end"

    async def script(body, request):
        if last_role(body) == "tool":
            return await say(request, text)
        return await make_calls(request, call("get_steps", {"x" * 200: "y" * 500}))

    async def scenario(page, site):
        await page.until("document.querySelector('#examples button')")
        assert await page.run(OVERFLOWING) == []
        await page.run("document.querySelector('details').open = true")
        await ask(page, "z" * 500)
        assert await page.run(OVERFLOWING) == []
        assert await parts(page, "article > .coach") == [text]

    browse(scenario, script, width=width, height=640)


# What reaches beyond the window or scrolls sideways, by its tag.
OVERFLOWING = """[...document.querySelectorAll("body, body *:not(.unseen, script, style)")].filter(
  found => found.getBoundingClientRect().right > innerWidth + 0.5 || found.scrollWidth > found.clientWidth + 1
           && getComputedStyle(found).display !== "inline" && found.clientWidth
).map(found => `${found.tagName} ${found.id} ${found.className}`)"""


@pytest.mark.parametrize(
    ("text", "direction"),
    [("שלום, 5 steps", "rtl"), ("مرحبا", "rtl"), ("Hello שלום", "ltr"), ("🏃🏽‍♀️ 5", "ltr")],
    ids=["hebrew", "arabic", "english", "emoji"],
)
def test_text_runs_the_way_its_script_does(browse, text, direction):
    async def scenario(page, site):
        await ask(page, text)
        for selector in ("article h2", "article .coach"):
            assert await parts(page, selector) == [text]
            found = f"document.querySelector('{selector}')"
            assert await page.run(f"getComputedStyle({found}).direction") == direction

    browse(scenario, saying(text))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_both_colour_schemes(browse, scheme):
    async def script(body, request):
        if last_role(body) == "tool":
            return await say(request, "Done.") if len(body["messages"]) < 5 else await stream(request, chunk("stop"))
        return await make_calls(request, call("get_steps"), call("get_moon", index=1))

    async def scenario(page, site):
        await page.colours(scheme)
        await page.until("document.querySelector('dd') && document.querySelector('#examples button')")
        texts = ("h1", "summary", "#reset", "dt", "dd", "#start h2", "#examples button", "#question", "#keys", "#send")
        empty = {text: await page.run(contrast(text)) for text in texts}
        await ask(page)
        site.fake.script = hang
        await ask(page, until="document.querySelector('.wait')?.textContent")
        talk = {
            text: await page.run(contrast(text))
            for text in ("article h2", ".coach", ".step", ".error", ".wait", "#send")
        }
        await page.press("Escape")
        await page.until(IDLE)
        talk["stopped"] = await page.run(contrast(".detail"))
        assert {name: ratio for name, ratio in {**empty, **talk}.items() if ratio < 4.5} == {}
        dark = await page.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")

    browse(scenario, script)


def contrast(selector):
    """Contrast of a text with what is behind it, as WCAG 2 defines it: at least 4.5 for text of this size."""
    return f"({CONTRAST})({json.dumps(selector)})"


CONTRAST = """selector => {
  const painter = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const paint = colour => { painter.fillStyle = colour; painter.fillRect(0, 0, 1, 1); };
  const luminance = () => {
    const [r, g, b] = [...painter.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = document.querySelector(selector), behind = [];
  for (let at = found; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
  behind.forEach(paint);
  const below = luminance();
  paint(getComputedStyle(found).color);
  const [dark, light] = [below, luminance()].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}"""


def test_the_end_stays_in_sight_unless_one_has_scrolled_away(browse):
    log = "document.querySelector('#log')"
    at_end = f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 2"

    async def scenario(page, site):
        await ask(page)
        assert await page.run(f"{log}.scrollHeight > {log}.clientHeight && {at_end}")
        site.fake.script = script = HalfWay()
        await ask(page, until=f"{IDLE} || document.querySelectorAll('.coach').length === 2")
        await page.run(f"{log}.scrollTop = 0")
        script.go_on.set()
        await page.until(IDLE)
        assert await page.run(f"{log}.scrollTop") == 0
        await page.type("More?")
        await page.press("Enter")
        await page.until(at_end)

    browse(scenario, saying("long " * 500))


# ------------------------------------------------------------------------------------ without a mouse or a screen


def test_all_of_it_works_from_the_keyboard(browse):
    focus = "(found => found.getAttribute('aria-label') || found.textContent)(document.activeElement)"

    async def scenario(page, site):
        await page.until(f"document.querySelectorAll('#examples button').length === 5 && {IN_FIELD}")
        seen = []
        for _ in range(10):
            seen.append(await page.run(focus))
            await page.press("Tab")
        assert seen[:2] == ["Your question", "Ask"]
        assert "New conversation" in seen
        assert "Conversation" in seen
        assert "What is my heart rate?" in seen
        await page.run("document.querySelector('#examples button:nth-child(3)').focus()")
        await page.press("Enter")
        await page.until(ANSWERED)
        assert asked(site.fake) == ["How long did I sleep last night?"]
        assert await page.run(IN_FIELD)

    browse(scenario, coach)


def test_a_screen_reader_is_told_names_and_each_answer_once(browse):
    script = HalfWay()

    async def status(page):
        (found,) = [node for node in await page.accessible() if node["role"] == "status"]
        assert found["live"] == "polite"
        return await page.run("document.querySelector('[role=status]').textContent")

    async def scenario(page, site):
        await page.until(IN_FIELD)
        named = {(node["role"], node["name"]): node for node in await page.accessible()}
        assert named["textbox", "Your question"]["focused"]
        assert {("button", "Ask"), ("button", "New conversation"), ("main", "Conversation")} <= named.keys()
        await ask(page, until="document.querySelector('.coach')")
        assert await status(page) == ""
        script.go_on.set()
        await page.until(IDLE)
        assert await status(page) == "Half of an answer."
        assert ("heading", "Steps?") in {(node["role"], node["name"]) for node in await page.accessible()}
        site.fake.script = hang
        await ask(page, until=f"!({IDLE})")
        await page.press("Escape")
        await page.until(IDLE)
        assert await status(page) == "stopped"

    browse(scenario, script)


def test_a_phones_keyboard_does_not_rise_on_its_own(browse):
    async def scenario(page, site):
        await page.until("document.querySelector('#examples button')")
        await page.run("document.activeElement.blur()")
        await page.click("#examples button")
        await page.until(ANSWERED)
        assert not await page.run(IN_FIELD)
        assert not await page.run("document.querySelector('#keys').checkVisibility()")

    browse(scenario, coach, width=360, height=640)
