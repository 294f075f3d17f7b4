# SPDX-License-Identifier: Apache-2.0
"""What a server on a network needs beside an API key: a limit to request bodies, and no key where it can be read.

`install` is a plugin of the group ``sglang.srt.plugins``, which SGLang calls in each of its processes before the server
starts. It uses what SGLang and Starlette offer for that: a middleware, an endpoint's level of authorisation, a log filter.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException
from starlette.responses import JSONResponse

BODY_VARIABLE = "SGLANG_SM120_MAX_BODY_MIB"
DEFAULT_BODY_MIB = 32
MIB = 1 << 20
HTTP_MODULE = "sglang.srt.entrypoints.http_server"
# The line that prints all arguments at the start.
ARGUMENTS_LOGGER = "sglang.srt.entrypoints.engine"
# Without a mark of their own: they print the admin key with all other arguments, or read pickled tensors.
ADMIN_PATHS = ("/server_info", "/get_server_info", "/load_lora_adapter_from_tensors")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def body_limit(value: str | None) -> int:
    """Bytes of the largest body that is read, from the value of `BODY_VARIABLE`. Errors: SystemExit, with one line."""
    if value is None:
        return DEFAULT_BODY_MIB * MIB
    if not value.isascii() or not value.isdigit() or int(value) == 0:
        # SGLang logs other exceptions of a plugin and goes on without it.
        sys.exit(
            f"error: {BODY_VARIABLE}: expected a whole number of MiB from 1 on, got {value!r}; correct or unset it"
        )
    return int(value) * MIB


class BodyLimit:
    """ASGI middleware that answers HTTP 413 to a body above `limit_bytes`, without keeping more than that.

    A prompt becomes tokens in the process that serves HTTP: 16 MiB of text hold it for half a minute on two cores, and
    256 MiB take more memory than most machines have.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._announced(scope) > self._limit_bytes:
            await self._discard(receive)
            await JSONResponse(self._refusal(), 413, {"connection": "close"})(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit_bytes:
                # The one exception that FastAPI lets through when it reads a body.
                raise HTTPException(413, self._refusal()["message"])
            return message

        await self._app(scope, counted, send)

    @staticmethod
    def _announced(scope: Message) -> int:
        length = dict(scope["headers"]).get(b"content-length", b"")
        return int(length) if length.isdigit() else 0

    async def _discard(self, receive: Receive) -> None:
        """Read what is on its way, so that the client is listening when the answer comes; but not without end."""
        discarded = 0
        while discarded <= self._limit_bytes:
            message = await receive()
            discarded += len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    def _refusal(self) -> dict[str, Any]:
        text = (
            f"expected a body of at most {self._limit_bytes // MIB} MiB, got more; shorten it or raise {BODY_VARIABLE}"
        )
        return {"object": "error", "message": text, "type": "413", "param": None, "code": 413}


class HideKeys(logging.Filter):
    """Puts stars in the place of keys in SGLang's line of arguments."""

    _KEY = re.compile(r"(\b(?:admin_)?api_key=)(?:'[^']*'|\"[^\"]*\")")

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and "api_key=" in record.msg:
            record.msg = self._KEY.sub(r"\1'***'", record.msg)
        return True


def require_admin(app: Any) -> None:
    """Give `ADMIN_PATHS` the level of their like: the admin key where there is one, else the API key."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in app.routes:
        if getattr(route, "path", None) in ADMIN_PATHS:
            auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)


def install() -> None:
    """Guard the HTTP server and the log of the process that the operator starts. Errors: SystemExit."""
    if multiprocessing.parent_process() is not None:
        return  # a scheduler or the like, which serves no HTTP and does not print the arguments
    limit_bytes = body_limit(os.environ.get(BODY_VARIABLE))
    logging.getLogger(ARGUMENTS_LOGGER).addFilter(HideKeys())
    # Before anything else imports it, where the server is started from a command line.
    app = importlib.import_module(HTTP_MODULE).app
    app.add_middleware(BodyLimit, limit_bytes=limit_bytes)
    require_admin(app)
