"""Registered segments as tests use them."""

from __future__ import annotations

from typing import Any

from tests.server import requests
from tests.server.requests import CHAT, MARK, REPORT, openai
from tests.server.serving import Reply, Server

SEGMENTS = "/v1/segments"
SALT = "x-cache-salt"


class Names:
    """Segments of one test, by id, under tenants of its own."""

    def __init__(self, server: Server, tenant: str) -> None:
        self.server, self.tenant = server, tenant
        self.tenants = {tenant}

    def post(self, *contents: str | list[int], tenant: str | None = None, **fields: Any) -> Reply:
        tenant = self.tenant if tenant is None else tenant
        self.tenants.add(tenant)
        segments = [{"text" if isinstance(c, str) else "input_ids": c} for c in contents]
        return self.server.post(SEGMENTS, {"segments": segments, "cache_salt": tenant, **fields})

    def register(self, *contents: str | list[int], **fields: Any) -> list[dict[str, Any]]:
        reply = self.post(*contents, **fields)
        assert reply.status == 200, reply.body
        return list(reply.body["data"])

    def call(self, method: str, name: str = "", tenant: str | None = None, **params: Any) -> Reply:
        headers = {SALT: self.tenant if tenant is None else tenant}
        path = f"{SEGMENTS}/{name}" if name else SEGMENTS
        response = self.server.http.request(method, path, headers=headers, params=params)
        return Reply(response.status_code, response.json())

    def get(self, name: str) -> dict[str, Any]:
        reply = self.call("GET", name)
        assert reply.status == 200, reply.body
        return dict(reply.body)

    def listed(self, tenant: str | None = None, **params: Any) -> list[dict[str, Any]]:
        return list(self.call("GET", tenant=tenant, **params).body["data"])

    def clear(self) -> None:
        for tenant in self.tenants:
            for one in self.listed(tenant, limit=1000):
                self.call("DELETE", one["id"], tenant)


def chat(tenant: str, *parts: str | dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A question about parts: plain texts, marked ones and named segments."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {
        "messages": [{"role": "user", "content": content}],
        "cache_salt": tenant,
        "hypic": REPORT,
        **openai(max_tokens=5),
        **fields,
    }


def named(one: dict[str, Any] | str) -> dict[str, Any]:
    return {"type": "segment", "id": one if isinstance(one, str) else one["id"]}


def marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, **MARK}


def report_of(answer: Any) -> dict[str, Any]:
    (report,) = requests.reports(CHAT, answer)
    return report
