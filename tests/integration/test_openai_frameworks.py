"""Frameworks on OpenAI's API work against a real server: LangChain, and Vercel's AI SDK where there is Node.js.

Both by chats and by responses. The model knows nothing, so that tools are called because they have to be, within their
schemas.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.integration.openai_calls import MODEL, PROMPT, chat
from tests.integration.test_openai import NO_SPACE
from tests.support.cluster.serving import HANG_GUARD_S, Deployment

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

AI_SDK = Path(__file__).parent / "ai_sdk"
OLDEST_NODE = 20
EVERY_API = pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])


class Paint(BaseModel):
    """Paints it."""

    ok: bool
    colour: Literal["red", "green"]


@pytest.fixture
def client(pair: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def model(pair: Deployment, responses: bool, **more: Any) -> ChatOpenAI:
    settings = {"temperature": 0.0, "max_tokens": 24, "max_retries": 0, **more}
    return ChatOpenAI(
        base_url=f"{pair.http_url}/v1", api_key="none", model=MODEL, use_responses_api=responses, **settings
    )


@EVERY_API
def test_langchain_gets_the_answer_whole_and_in_parts(pair: Deployment, client: openai.OpenAI, responses: bool) -> None:
    asked = model(pair, responses)
    expected = chat(client, temperature=0).choices[0].message.content
    answer = asked.invoke(PROMPT)
    assert answer.text == expected
    assert answer.usage_metadata["output_tokens"] == 24
    assert "".join(part.text for part in asked.stream(PROMPT)) == expected
    together = asked.batch([PROMPT, PROMPT])
    assert [each.text for each in together] == [expected] * 2


@EVERY_API
def test_langchain_calls_a_tool_and_reads_back_what_it_gave(pair: Deployment, responses: bool) -> None:
    asked = model(pair, responses, max_tokens=300, temperature=1.0, extra_body={"logit_bias": NO_SPACE, "seed": 2})
    armed = asked.bind_tools([Paint], tool_choice="required", strict=True, parallel_tool_calls=False)
    answer = armed.invoke(PROMPT)
    [call] = answer.tool_calls
    assert call["name"] == "Paint"
    assert Paint(**call["args"])
    whole: Any = None
    for part in armed.stream(PROMPT):
        whole = part if whole is None else whole + part
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    said = [HumanMessage(PROMPT), answer, ToolMessage("painted", tool_call_id=call["id"])]
    assert isinstance(model(pair, responses).bind_tools([Paint]).invoke(said), AIMessage)


@EVERY_API
def test_langchain_has_structured_output(pair: Deployment, responses: bool) -> None:
    asked = model(pair, responses, max_tokens=300, extra_body={"logit_bias": NO_SPACE, "seed": 1})
    found = asked.with_structured_output(Paint, method="json_schema", strict=True).invoke(PROMPT)
    assert isinstance(found, Paint)


@pytest.fixture(scope="module")
def ai_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SDK in it, as the lock file has it."""
    if shutil.which("npm") is None or _node_version() < OLDEST_NODE:
        pytest.skip(f"needs npm and node {OLDEST_NODE} or newer")
    folder = tmp_path_factory.mktemp("ai_sdk")
    for file in AI_SDK.iterdir():
        shutil.copy(file, folder)
    npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        subprocess.run(npm, cwd=folder, capture_output=True, text=True, timeout=300, check=True)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot install the AI SDK here: {error} {getattr(error, 'stderr', '')}")
    return folder


def _node_version() -> int:
    """0 where there is none."""
    if shutil.which("node") is None:
        return 0
    asked = ["node", "-p", "process.versions.node.split('.')[0]"]
    return int(subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout)


@EVERY_API
def test_the_ai_sdk_does_all_it_can(pair: Deployment, client: openai.OpenAI, ai_sdk: Path, responses: bool) -> None:
    """Text, a stream, a tool that is called, run and read back within a stream, and an object."""
    way = "responses" if responses else "chat"
    command = ["node", "every_way.mjs", f"{pair.http_url}/v1", MODEL, way, PROMPT]
    done = subprocess.run(command, cwd=ai_sdk, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    expected = chat(client, temperature=0).choices[0].message.content
    assert found["text"] == {"text": expected, "finishReason": "length", "outputTokens": 24}
    assert found["stream"] == expected
    first, second = found["tools"]
    assert Paint(**first["calls"][0])
    assert first["results"] == [f"painted {first['calls'][0]['colour']}"]
    assert not second["calls"]
    assert second["text"]
    assert Paint(**found["object"])
