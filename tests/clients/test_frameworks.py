"""Frameworks for Python, over the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import instructor
import litellm
import openai
import pytest
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage as HaystackMessage
from haystack.tools import Tool
from haystack.utils import Secret
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.asking import ARGUMENTS, CALL, PLACE, WEATHER, Weather, recording, user

BONN = Weather(place="Bonn")


def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


def langchain_models(url: str) -> list[Any]:
    return [
        ChatOpenAI(model="talker", base_url=f"{url}/v1", api_key="any", max_retries=0),
        ChatOpenAI(model="talker", base_url=f"{url}/v1", api_key="any", max_retries=0, use_responses_api=True),
        ChatAnthropic(model="talker", base_url=url, api_key="any", max_retries=0, max_tokens=100),
    ]


@pytest.mark.client("LangChain", "chat", "responses", "messages", "streaming")
def test_langchain_chats(url: str) -> None:
    for model in langchain_models(url):
        assert model.invoke("hello there").text == "hello there"
        assert "".join(chunk.text for chunk in model.stream("hello there")) == "hello there"


@pytest.mark.client("LangChain", "tools", "streaming")
def test_langchain_calls_tools(url: str) -> None:
    for model in langchain_models(url):
        bound = model.bind_tools([tool(weather)])
        (call,) = bound.invoke(CALL).tool_calls
        assert (call["name"], call["args"]) == ("weather", {"place": "Bonn"})
        chunks = list(bound.stream(CALL))
        message = sum(chunks[1:], chunks[0])
        assert [call["args"] for call in message.tool_calls] == [{"place": "Bonn"}]
        history = [("user", CALL), message, tool(weather).invoke(message.tool_calls[0])]
        assert bound.invoke(history).text == "sunny in Bonn"


@pytest.mark.client("LangChain", "structured output")
def test_langchain_parses(url: str) -> None:
    chat, responses, messages = langchain_models(url)
    assert chat.with_structured_output(Weather, method="json_schema").invoke(ARGUMENTS) == BONN
    assert chat.with_structured_output(Weather, method="function_calling").invoke(ARGUMENTS) == BONN
    assert responses.with_structured_output(Weather).invoke(ARGUMENTS) == BONN
    assert messages.with_structured_output(Weather).invoke(ARGUMENTS) == BONN


@pytest.mark.client("LangChain", "errors")
def test_langchain_gets_errors(url: str) -> None:
    model = ChatOpenAI(model="nobody", base_url=f"{url}/v1", api_key="any", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        model.invoke("a")


def llama_index_model(url: str, name: str = "talker", **more: Any) -> Any:
    more = {"is_chat_model": True, "is_function_calling_model": True, **more}
    return OpenAILike(model=name, api_base=f"{url}/v1", api_key="any", max_retries=0, **more)


@pytest.mark.client("LlamaIndex", "chat", "completions", "streaming")
def test_llama_index_chats(url: str) -> None:
    model = llama_index_model(url)
    messages = [ChatMessage(role="user", content="hello there")]
    assert model.chat(messages).message.content == "hello there"
    assert "".join(part.delta or "" for part in model.stream_chat(messages)) == "hello there"
    assert llama_index_model(url, is_chat_model=False).complete("a text").text == "a text"


@pytest.mark.client("LlamaIndex", "tools", "structured output")
def test_llama_index_calls_tools_and_parses(url: str) -> None:
    model = llama_index_model(url)
    tools = [FunctionTool.from_defaults(weather)]
    response = model.chat_with_tools(tools, user_msg=CALL)
    (call,) = model.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"place": "Bonn"})
    assert model.predict_and_call(tools, user_msg=CALL).response == "sunny in Bonn"
    required = '!say [{"name": "Weather", "arguments": {"place": "Bonn"}}]'
    answer = model.as_structured_llm(Weather).chat([ChatMessage(role="user", content=required)])
    assert answer.raw == BONN


@pytest.mark.client("LlamaIndex", "errors")
def test_llama_index_gets_errors(url: str) -> None:
    with pytest.raises(openai.NotFoundError):
        llama_index_model(url, "nobody").chat([ChatMessage(role="user", content="a")])


def haystack_model(url: str, name: str = "talker", **more: Any) -> OpenAIChatGenerator:
    key = Secret.from_token("any")
    return OpenAIChatGenerator(api_key=key, model=name, api_base_url=f"{url}/v1", max_retries=0, **more)


@pytest.mark.client("Haystack", "chat", "streaming")
def test_haystack_chats(url: str) -> None:
    messages = [HaystackMessage.from_user("hello there")]
    assert haystack_model(url).run(messages)["replies"][0].text == "hello there"
    parts: list[str] = []
    reply = haystack_model(url, streaming_callback=lambda chunk: parts.append(chunk.content)).run(messages)
    assert reply["replies"][0].text == "".join(parts) == "hello there"


@pytest.mark.client("Haystack", "tools", "structured output", "errors")
def test_haystack_calls_tools_and_parses(url: str) -> None:
    tools = [Tool(name="weather", description="The weather.", parameters=PLACE, function=weather)]
    (call,) = haystack_model(url).run([HaystackMessage.from_user(CALL)], tools=tools)["replies"][0].tool_calls
    assert (call.tool_name, call.arguments) == ("weather", {"place": "Bonn"})
    form = {"response_format": Weather}
    reply = haystack_model(url, generation_kwargs=form).run([HaystackMessage.from_user(ARGUMENTS)])["replies"][0]
    assert Weather.model_validate_json(reply.text) == BONN
    with pytest.raises(openai.NotFoundError):
        haystack_model(url, "nobody").run([HaystackMessage.from_user("a")])


def litellm_models(url: str) -> list[dict[str, Any]]:
    more = {"api_key": "any", "max_retries": 0}
    return [
        {"model": "hosted_vllm/talker", "api_base": f"{url}/v1", **more},
        {"model": "openai/talker", "api_base": f"{url}/v1", **more},
        {"model": "anthropic/talker", "api_base": url, "max_tokens": 100, **more},
    ]


@pytest.mark.client("litellm", "chat", "messages", "streaming", "tools", "structured output")
def test_litellm_chats(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PLACE, "strict": True}}
    for model in litellm_models(url):
        answer = litellm.completion(**model, messages=[user("hello there")])
        assert answer.choices[0].message.content == "hello there"
        chunks = litellm.completion(**model, messages=[user("hello there")], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello there"
        answer = litellm.completion(**model, messages=[user(CALL)], tools=[WEATHER])
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"place": "Bonn"}
        answer = litellm.completion(**model, messages=[user(ARGUMENTS)], response_format=form)
        assert json.loads(answer.choices[0].message.content) == {"place": "Bonn"}


@pytest.mark.client("litellm", "responses", "completions", "embeddings", "rerank", "transcription")
def test_litellm_uses_other_routes(url: str) -> None:
    served = {"api_base": f"{url}/v1", "api_key": "any"}
    (item,) = litellm.responses(model="openai/talker", input="hello there", **served).output
    assert item.content[0].text == "hello there"
    completion = litellm.text_completion(model="hosted_vllm/talker", prompt="a text", **served)
    assert completion.choices[0].text == "a text"
    assert litellm.embedding(model="hosted_vllm/embedder", input=["a"], **served).data[0]["embedding"][0] == 1
    documents = ["a bus", "the bus to the library"]
    ranked = litellm.rerank(model="hosted_vllm/ranker", query="bus library", documents=documents, **served)
    assert [result["index"] for result in ranked.results] == [1, 0]
    heard = litellm.transcription(model="openai/listener", file=("a.wav", recording()), **served)
    assert heard.text == "0.5 seconds"


@pytest.mark.client("litellm", "errors")
def test_litellm_gets_errors(url: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="hosted_vllm/nobody", messages=[user("a")], api_base=f"{url}/v1", api_key="any")
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**litellm_models(url)[1], messages=[user("a")], extra_body={"max_token": 1})


@pytest.mark.client("instructor", "chat", "responses", "messages", "structured output", "streaming")
def test_instructor(url: str) -> None:
    modes = instructor.Mode
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    for mode in (modes.TOOLS, modes.JSON_SCHEMA, modes.RESPONSES_TOOLS):
        client = instructor.from_openai(chat, mode=mode)
        asked = {"model": "talker", "messages": [user(ARGUMENTS)], "max_retries": 0}
        assert client.create(response_model=Weather, **asked).place == "Bonn", mode
    streaming = instructor.from_openai(chat)
    *_, last = streaming.create_partial(response_model=Weather, model="talker", messages=[user(ARGUMENTS)])
    assert last.place == "Bonn"
    client = instructor.from_anthropic(claude)
    answer = client.create(response_model=Weather, model="talker", max_tokens=100, messages=[user(ARGUMENTS)])
    assert answer.place == "Bonn"


def pydantic_ai_models(url: str, name: str = "talker") -> list[Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    return [OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)]


@pytest.mark.client("pydantic-ai", "chat", "responses", "streaming", "tools", "structured output", "errors")
async def test_pydantic_ai(url: str) -> None:
    for model in pydantic_ai_models(url):
        assert (await Agent(model).run("hello there")).output == "hello there"
        async with Agent(model).run_stream("hello there") as run:
            assert [text async for text in run.stream_text()][-1] == "hello there"
        assert (await Agent(model, tools=[weather]).run(CALL)).output == "sunny in Bonn"
        called = '!say [{"name": "final_result", "arguments": {"place": "Bonn"}}]'
        assert (await Agent(model, output_type=Weather).run(called)).output == BONN
        assert (await Agent(model, output_type=NativeOutput(Weather)).run(ARGUMENTS)).output == BONN
    for model in pydantic_ai_models(url, "nobody"):
        with pytest.raises(ModelHTTPError) as caught:
            await Agent(model).run("a")
        assert caught.value.status_code == 404
