"""The routes that a trainer drives a server with, as vLLM has them: pausing, new weights, adapters under names."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field
from rlhf_http.fields import BadRequest, Fields, Name, read
from rlhf_http.handling import answered, body_of
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rlhf_core.contracts import Weights
from rlhf_core.errors import InputError
from rlhf_core.models import Model, peft
from rlhf_serve.app import Server
from rlhf_serve.engine import Policy
from rlhf_serve.opening import Opening, ServedAdapter, ServedPolicy, load_policy

MODES = ("abort", "wait", "keep")


class LoadAdapter(Fields):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: Name | None = None


class UnloadAdapter(Fields):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: int | None = None


class NewVersion(Fields):
    """The body of `/update_weight_version`."""

    new_version: Name


class CollectiveCall(Fields):
    """The body of `/collective_rpc`."""

    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = None
    model: Name | None = None


class AbortRequests(Fields):
    """The body of `/abort_requests`."""

    request_ids: list[str] | None = None


class Control:
    """The control routes of one server.

    adapters: the directory that adapters may be loaded from, if any. most_adapters: of a policy that are loaded at a
    time; each holds merged weights.
    """

    def __init__(self, server: Server, opening: Opening, adapters: Path | None, most_adapters: int) -> None:
        self.server, self.opening, self.most_adapters = server, opening, most_adapters
        self.directory = None if adapters is None else adapters.resolve(strict=True)
        self._changing = asyncio.Lock()

    def routes(self) -> list[Route]:
        """List the routes."""
        posts = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_requests,
            "/collective_rpc": self.collective_rpc,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/update_weight_version": self.update_weight_version,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
        }
        gets = {"/is_paused": self.is_paused, "/weight_info": self.weight_info}
        return [
            *(Route(path, answered(handler), methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, answered(handler), methods=["GET"]) for path, handler in gets.items()),
        ]

    def _policy(self, name: str | None = None) -> ServedPolicy:
        """Find the policy that a request means: by its name, or the only one."""
        policies = {each.name: each for each in self.server.policies()}
        if name in policies:
            return policies[name]
        if name is None and len(policies) == 1:
            return next(iter(policies.values()))
        known = ", ".join(policies) or "none"
        raise BadRequest(
            f"name the policy; there are: {known}" if name is None else f"no policy '{name}': {known}"
        )

    async def pause(self, request: Request) -> Response:
        """Stop sampling: abort what runs, wait for it, or keep it; requests that come wait until `resume`."""
        mode = request.query_params.get("mode", "abort")
        if mode not in MODES:
            raise BadRequest(f"mode: '{mode}' is none of {', '.join(MODES)}", param="mode")
        engine = self.server.engine
        paused = await engine.call(partial(engine.pause, mode))
        await asyncio.wrap_future(paused)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Sample again."""
        await self.server.engine.call(self.server.engine.resume)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Say whether sampling is paused."""
        return JSONResponse({"is_paused": self.server.engine.paused})

    async def abort_requests(self, request: Request) -> Response:
        """End requests with what they have: those named, or all."""
        body = read(AbortRequests, await body_of(request) or b"{}")
        calls = [call for call in self.server.calls if not body.request_ids or call.id in body.request_ids]
        for call in calls:
            for pending in call.completions:
                if not pending.over:
                    pending.finish("abort")
                    pending.end(pending)
        return JSONResponse({"status": "aborted", "aborted": len(calls)})

    async def collective_rpc(self, request: Request) -> Response:
        """Call `reload_weights`: from the directory `weights_path`, or the one that the policy came from."""
        body = read(CollectiveCall, await body_of(request))
        if body.method != "reload_weights":
            raise BadRequest(f"method: '{body.method}' is not supported; reload_weights is", param="method")
        known = {"weights_path", "is_checkpoint_format"}
        unknown = sorted(set(body.kwargs) - known)
        if unknown:
            raise BadRequest(f"kwargs: {unknown[0]} is not supported; weights_path is", param="kwargs")
        served = self._policy(body.model)
        path = body.kwargs.get("weights_path") or served.path
        if not isinstance(path, str):
            raise BadRequest("kwargs.weights_path: must be a directory's name", param="kwargs")
        async with self._changing:
            await self.server.engine.call(partial(self._reload, served, path))
        return JSONResponse({"results": [None]})

    def _reload(self, served: ServedPolicy, path: str) -> None:
        """Replace a policy's weights; in the engine's thread. Nothing is changed where they do not fit."""
        policy = served.policy
        model = load_policy(path, self.opening)
        if model.definition != policy.model.definition:
            raise InputError(
                f"{path}: its config.json describes another model than {served.name}, whose weights it should replace"
            )
        changed = policy.model.with_params(model.params)
        adapters = [self._merged(policy, changed, each.path) for each in served.adapters.values()]
        policy.weights.value = policy.sampler.place(model.params).value
        for adapter, merged in zip(served.adapters.values(), adapters, strict=True):
            adapter.weights.value = merged.value
        policy.model = changed
        policy.keep_only([policy.weights, *(adapter.weights for adapter in served.adapters.values())])
        policy.schedule.forget_prompts()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the prompts in caches; with reset_running_requests, compute those of running completions again."""
        running = request.query_params.get("reset_running_requests", "false").lower() in ("true", "1")

        def reset() -> None:
            for served in self.server.policies():
                served.policy.schedule.forget_prompts()
                if running:
                    served.policy.schedule.feed_again()

        await self.server.engine.call(reset)
        return JSONResponse({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        """Name the weights, from the next tokens on."""
        body = read(NewVersion, await body_of(request))

        def name() -> None:
            for served in self.server.policies():
                served.policy.version = body.new_version

        await self.server.engine.call(name)
        return JSONResponse({"success": True, "new_version": body.new_version})

    async def weight_info(self, request: Request) -> Response:
        """Say what the weights are called."""
        return JSONResponse({"weight_version": self._first().policy.version})

    def _first(self) -> ServedPolicy:
        if not self.server.policies():
            raise BadRequest("there is no policy")
        return self.server.policies()[0]

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter under a name, which requests may then give as their model."""
        body = read(LoadAdapter, await body_of(request))
        name = body.lora_name
        if not name or not body.lora_path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be given", kind="InvalidUserInput")
        served = self._policy(body.base_model_name)
        async with self._changing:
            owner = next((each for each in self.server.policies() if name in each.adapters), None)
            if name in self.server.models or (owner is not None and owner is not served):
                raise BadRequest(
                    f"lora_name: there is a model '{name}'", "lora_name", kind="InvalidUserInput"
                )
            if owner is not None and not body.load_inplace:
                raise BadRequest(
                    f"lora_name: the adapter '{name}' has been loaded already; give load_inplace to replace it",
                    "lora_name",
                    kind="InvalidUserInput",
                )
            if owner is None and len(served.adapters) >= self.most_adapters:
                raise BadRequest(
                    f"{self.most_adapters} adapters are loaded; unload one first, or start the server with a larger "
                    "--max-adapters",
                    kind="InvalidUserInput",
                )
            path = self._adapter_directory(body.lora_path)
            await self.server.engine.call(partial(self._load, served, name, path))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def _load(self, served: ServedPolicy, name: str, path: Path) -> None:
        """Load an adapter, in the engine's thread; completions that began with one of that name keep it."""
        weights = self._merged(served.policy, served.policy.model, str(path))
        served.adapters[name] = ServedAdapter(name, str(path), weights)

    def _merged(self, policy: Policy, base: Model, path: str) -> Weights:
        """Merge an adapter into the weights of its base. Raises InputError where these are quantized."""
        if base.quantized is not None:
            raise InputError(
                f"{path}: an adapter is merged into weights in float32, and {base.source} is held in {base.quantized}; "
                "start the server with --quantize none"
            )
        adapted = peft.StoredAdapter(Path(path)).on(base, peft.Base(str(base.source), None))
        merged = adapted if adapted.definition.lora is None else adapted.merged()
        return policy.sampler.place(merged.params)

    def _adapter_directory(self, given: str) -> Path:
        """Find an adapter's directory below the one that is allowed. Raises BadRequest for any other."""
        if self.directory is None:
            raise BadRequest("the server was started without --adapters DIR", "lora_path")
        outside = BadRequest(
            f"lora_path: {given!r} is not below the directory that --adapters names", "lora_path"
        )
        if "\0" in given or ".." in Path(given).parts:
            raise outside
        path = self.directory / given
        try:
            found = path.resolve(strict=True)
        except (OSError, RuntimeError):
            found = path if path.is_relative_to(self.directory) else Path("/")
            if found != Path("/"):
                raise BadRequest(
                    f"lora_path: there is no directory {given!r}", "lora_path", status=404
                ) from None
        if not found.is_relative_to(self.directory) or found == self.directory:
            raise outside
        if not found.is_dir():
            raise BadRequest(f"lora_path: {given!r} is not a directory", "lora_path")
        for file in found.iterdir():
            if not file.resolve().is_relative_to(self.directory):
                raise outside
        return found

    async def unload_adapter(self, request: Request) -> Response:
        """Forget an adapter; completions that began with it end with it."""
        body = read(UnloadAdapter, await body_of(request))
        name = body.lora_name
        async with self._changing:
            owner = next((each for each in self.server.policies() if name in each.adapters), None)
            if owner is None:
                raise BadRequest(
                    f"lora_name: there is no adapter '{name}'", "lora_name", status=404, kind="NotFoundError"
                )
            del owner.adapters[name]
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
