"""A model behind an OpenAI-compatible API: chat messages in, text out. Its token ids are unknown, so its answers are
scored and compared but never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.transport import ClientSettings, HttpTransport
from agl_slime.errors import ConfigError
from agl_slime.support.net import shown_url

DEFAULT_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ChatApi:
    """``model`` at an OpenAI-compatible ``url``, as in ``OPENAI_BASE_URL``; ``/v1`` is added to a URL without path."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.model} at {shown_url(self.url)}"

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Mapping[str, Any]:
        """The chat completion, with the retries and typed errors of the SGLang client. Sends temperature, top_p, stop
        and max_new_tokens of ``sampling``."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        body |= {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens}
        body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        body |= {"stop": list(sampling.stop)} if sampling.stop else {}
        body |= {"tools": list(tools)} if tools else {}
        timeout_s = self._http.settings.total_timeout_s
        return await self._http.call("POST", self._path("chat/completions"), body, timeout_s=timeout_s)

    async def models(self) -> list[str]:
        listed = (await self._http.call("GET", self._path("models"), max_attempts=2)).get("data")
        return [str(model["id"]) for model in listed or () if isinstance(model, Mapping) and model.get("id")]

    async def aclose(self) -> None:
        await self._http.aclose()

    def _path(self, name: str) -> str:
        return f"{urlsplit(self.base_url).path}/{name}"

    @cached_property
    def _http(self) -> HttpTransport:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"the address must look like https://host/v1, got {shown_url(self.url)!r}")
        settings = ClientSettings(api_key=self.api_key or None)
        return HttpTransport(base_url=f"{address.scheme}://{address.netloc}", settings=settings)
