"""The coach's web page over a scripted model, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from fake_openai import FakeServer, Script, serving

from fitnesscoach.backends.endpoint import Endpoint
from fitnesscoach.providers import FitnessData
from fitnesscoach.session import Session
from fitnesscoach.tools import Kind, tool_set
from fitnesscoach.web import application


class ServedPage:
    """The page's server, which can go away and come back under the same address."""

    def __init__(self, fake: FakeServer, backend: Endpoint, data: FitnessData, tools: Kind) -> None:
        self.fake, self._port = fake, 0
        self._new_session = lambda: Session(backend, tool_set(tools, data), data)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        app = application(self._new_session, "127.0.0.1")
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()


@asynccontextmanager
async def served(script: Script, data: FitnessData, tools: Kind = "basic") -> AsyncIterator[ServedPage]:
    """A page that answers as the script says."""
    async with serving(script) as fake:
        backend = Endpoint(fake.url, "tuned", timeout=10)
        page = ServedPage(fake, backend, data, tools)
        await page.start()
        try:
            yield page
        finally:
            await page.stop()
            await backend.close()
