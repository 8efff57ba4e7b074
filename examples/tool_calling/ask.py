"""Answer a question with the help of a function: python ask.py [QUESTION] [--url URL]."""

import argparse
import json
from typing import Any

import openai

MODEL = "assistant"
FORECASTS = {"Berlin": "rain, 11 degrees", "Lisbon": "sun, 24 degrees"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather forecast of today for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": sorted(FORECASTS)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Do I need an umbrella in Berlin today?")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="address of OpenAI's API")
    arguments = parser.parse_args()

    client = openai.OpenAI(base_url=arguments.url, api_key="not needed")
    messages: list[Any] = [{"role": "user", "content": arguments.question}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=48
    )
    message: Any = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        print(f"{call.function.name}({call.function.arguments})")
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": FORECASTS[city]})
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=48)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
