"""The program that plays a seat of verifiers in this process: a chat with the tools of the task, and nothing else."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class ChatConfig(HarnessConfig):
    """Settings of verifiers' own chat program; none is added."""


class Chat(Harness[ChatConfig]):
    """Answers tool calls until a message has none, as verifiers' `null` program does, without a process per episode."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Converse through verifiers' interception at `endpoint`; what went wrong there is the result's text."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            schemas, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers))
            asked = {"model": ctx.model, "messages": messages} | ({"tools": schemas} if schemas else {})
            while True:
                answer = await client.post(f"{endpoint}/chat/completions", json=asked)
                if answer.status_code != httpx.codes.OK:
                    return ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    content = await answer_call(call, names, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def answer_call(call: dict[str, Any], names: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Call a tool; unknown names, arguments that are no JSON and exceptions are answers that say so."""
    function = call["function"]
    if function["name"] not in names:
        return f"Error: no tool {function['name']!r}; there are {', '.join(sorted(names))}"
    try:
        return await call_mcp(connections, names, function["name"], json.loads(function["arguments"] or "{}"))
    except Exception as error:
        return f"Error: {error}"
