"""NeMo Gym's own servers at a recorder: python tests/programs/clients/nemo_gym_servers.py, with the work as JSON on
stdin. Runs in a Python that has nemo-gym."""

import asyncio
import json
import sys
import tempfile
from typing import Any


async def play(*, url: str, model: str, ports: list[int], question: str, tool: dict[str, Any]) -> dict[str, Any]:
    """One rollout of ``simple_agent`` through ``vllm_model``; returns the result of its ``/run``."""
    import aiohttp
    import uvicorn
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig,
        BaseVerifyRequest,
        BaseVerifyResponse,
        SimpleResourcesServer,
    )
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
    from omegaconf import OmegaConf
    from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
    from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

    class Weather(SimpleResourcesServer):
        def setup_webserver(self) -> Any:
            app = super().setup_webserver()
            app.post("/weather")(self.weather)
            return app

        async def weather(self) -> str:
            return "30 degrees"

        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            return BaseVerifyResponse(**body.model_dump(), reward=1.0)

    names = ("agent", "model", "resources")
    kinds = dict(zip(names, ("responses_api_agents", "responses_api_models", "resources_servers"), strict=True))
    addresses = {name: {"host": "127.0.0.1", "port": port} for name, port in zip(names, ports, strict=True)}
    global_config = OmegaConf.create({name: {kinds[name]: {name: addresses[name]}} for name in names})
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=global_config)
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    common = {name: {**addresses[name], "entrypoint": "app.py", "name": name} for name in names}
    refs = {
        "resources_server": {"type": kinds["resources"], "name": "resources"},
        "model_server": {"type": kinds["model"], "name": "model"},
    }
    vllm = {"base_url": url, "api_key": "none", "model": model, "return_token_id_information": True}
    servers = [
        SimpleAgent(config=SimpleAgentConfig(**common["agent"], **refs), server_client=client),
        VLLMModel(config=VLLMModelConfig(**common["model"], **vllm, uses_reasoning_parser=False), server_client=client),
        Weather(config=BaseResourcesServerConfig(**common["resources"], domain="agent"), server_client=client),
    ]
    options: dict[str, Any] = {"host": "127.0.0.1", "log_level": "warning"}
    apps = zip(servers, ports, strict=True)
    running = [uvicorn.Server(uvicorn.Config(app.setup_webserver(), port=port, **options)) for app, port in apps]
    tasks = [asyncio.create_task(server.serve()) for server in running]
    while not all(server.started for server in running):  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    body = {"responses_create_params": {"input": [{"role": "user", "content": question}], "tools": [tool]}}
    async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{ports[0]}/run", json=body) as answer:
        result = await answer.text()
        assert answer.status == 200, result
    for server in running:
        server.should_exit = True
    await asyncio.gather(*tasks)
    return json.loads(result)


def read(capture: dict[str, Any]) -> dict[str, Any]:
    """A recorded capture as NeMo Gym's types take it, and its trajectory and digests, if this version has them."""
    from nemo_gym.openai_utils import NeMoGymResponse

    response = NeMoGymResponse.model_validate(capture["response"]).model_dump()
    result: dict[str, Any] = {"output": response["output"], "digests": None, "trajectory": None}
    try:
        from nemo_gym.token_id_capture import TokenCaptureStore, TokenEntry, trajectories_for_rollout
    except ImportError:
        return result
    with tempfile.TemporaryDirectory() as directory:
        store = TokenCaptureStore(directory)
        for entry in capture["entries"]:
            store.append(TokenEntry.model_validate(entry))
        result["digests"] = store._read_state(capture["rollout_id"])["entry_digests"]
        result["trajectory"] = trajectories_for_rollout(capture["rollout_id"], [store.root])
    return result


if __name__ == "__main__":
    work = json.load(sys.stdin)
    print(json.dumps(read(work["capture"]) if "capture" in work else asyncio.run(play(**work))))
