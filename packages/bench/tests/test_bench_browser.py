"""The page of the tables in a real browser, wherever a Chromium is found."""

import asyncio

import chromium
import pytest

from portlab_bench.cli import main

pytestmark = chromium.needed()

WIDE = "document.documentElement.scrollWidth <= window.innerWidth"
# Labels of a plot that lie outside of it, or a link that leads nowhere.
OUTSIDE = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(t => {
    const b = t.getBoundingClientRect();
    const beside = b.left < box.left - 2 || b.right > box.right + 2;
    return b.width && (beside || b.top < box.top - 2 || b.bottom > box.bottom + 2);
  }).map(t => t.textContent);
})"""
DEAD = """[...document.querySelectorAll('a[href^="#"]')].map(a => a.getAttribute('href').slice(1))
  .filter(id => !document.getElementById(id))"""


@pytest.fixture(scope="module")
def browser_at(tmp_path_factory):
    with chromium.running(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.mark.parametrize(("width", "height"), [(1200, 900), (390, 844)], ids=["desk", "phone"])
def test_the_page_loads_nothing_fits_and_every_mark_leads_to_its_source(browser_at, tmp_path, width, height):
    file = tmp_path / "bench.html"
    assert main(["table", "--html", str(file)]) == 0

    async def scenario():
        async with chromium.connected(browser_at) as browser:
            page = await browser.open(file.as_uri(), width, height)
            assert page.problems == []
            assert [r for r in page.requests if not r.startswith((file.as_uri(), "data:"))] == []
            assert await page.run("document.querySelectorAll('svg').length") >= 3
            assert await page.run("document.querySelectorAll('script').length") == 0
            assert await page.run(WIDE)
            assert await page.run(OUTSIDE) == []
            assert await page.run(DEAD) == []
            await page.picture(tmp_path / "bench.png")

    asyncio.run(scenario())
    assert (tmp_path / "bench.png").stat().st_size > 10_000
