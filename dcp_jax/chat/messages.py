"""Messages and tools of a chat, in OpenAI's form, checked and brought into one shape.

In that shape every message has a `role` and a `content` that is text ("" where an assistant only
calls tools), `arguments` of a tool call are a dict, and nothing is None.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the one shape.

    Raises:
        ValueError: no message, or one that is malformed, names an unknown role or key, has content
            that is not text, or calls and results that do not belong together.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f'messages={messages!r} is not a list: give [{{"role": "user", "content": ...}}].'
        )
    if not messages:
        raise ValueError("messages=[] says nothing: give at least one message.")
    checked = [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    _check_results(checked)
    return checked


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools as they were given, if each is a named function.

    Raises:
        ValueError: a tool is not {"type": "function", "function": {"name": ...}}.
    """
    if tools is None:
        return []
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools={tools!r} is not a list: give a list of functions.")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and _is_name(function.get("name"))
        if not named or tool.get("type", "function") != "function":
            raise ValueError(
                f"tools[{i}]={tool!r} is not a function with a name: give "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}.'
            )
    return [dict(tool) for tool in tools]


def split_reasoning(message: Message) -> tuple[str, str]:
    """Reasoning and answer of an assistant message: of its own key, or of `<think>` in the text."""
    content = message["content"]
    if "reasoning_content" in message:
        return message["reasoning_content"], content
    if "</think>" not in content:
        return "", content
    before, _, _ = content.partition("</think>")
    return before.split("<think>")[-1].strip("\n"), content.split("</think>")[-1].lstrip("\n")


def to_json(value: Any) -> str:
    """JSON as the models were trained on it: a space after each comma and colon, no escapes."""
    return json.dumps(value, ensure_ascii=False)


def last_user_index(messages: Sequence[Message], roles: Sequence[str] = ("user",)) -> int:
    """Where the last turn of a user begins; -1 without one."""
    return max((i for i, m in enumerate(messages) if m["role"] in roles), default=-1)


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(
            f'{name}={message!r} is not a message: give {{"role": ..., "content": ...}}.'
        )
    given = {key: value for key, value in message.items() if value is not None}
    if "reasoning" in given:  # vLLM's newer name of the same
        given.setdefault("reasoning_content", given.pop("reasoning"))
    role = given.get("role")
    if role not in ROLES:
        raise ValueError(f"{name} has role={role!r}: roles are {', '.join(ROLES)}.")
    unknown = {key: value for key, value in given.items() if key not in _KEYS}
    if unknown:
        raise ValueError(
            f"{name} has {unknown!r}, which has no place in the prompt: a message has only "
            f"{', '.join(_KEYS)}."
        )
    for key in ("name", "reasoning_content", "tool_call_id"):
        if not isinstance(given.get(key, ""), str):
            raise ValueError(f"{name} has {key}={given[key]!r}, which is not text: give a string.")
    calls = given.pop("tool_calls", [])
    if calls:
        if role != "assistant":
            raise ValueError(
                f"{name} has tool_calls but role={role!r}: only an assistant calls tools."
            )
        given["tool_calls"] = _tool_calls(calls, f"{name}.tool_calls")
    if "content" not in given and not calls:
        raise ValueError(
            f"{name} has no content: give text (only an assistant that calls tools may have none)."
        )
    given["content"] = _text(given.get("content", ""), f"{name}.content")
    return given


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(
            f'{name}={content!r} is not text: give a string or a list of {{"type": "text"}} parts.'
        )
    for i, part in enumerate(content):
        text = isinstance(part, Mapping) and part.get("type") == "text"
        if not text or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{name}[{i}]={part!r} is not text, and the model reads nothing else: give "
                '{"type": "text", "text": ...} parts.'
            )
    return "".join(part["text"] for part in content)


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{name}={calls!r} is not a list: give a list of calls.")
    return [_tool_call(call, f"{name}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not _is_name(function.get("name")):
        raise ValueError(
            f"{name}={call!r} names no function: give "
            '{"type": "function", "function": {"name": ..., "arguments": ...}}.'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(
                f"{name} has arguments={arguments!r}, which is not JSON ({error}): give a JSON "
                "object."
            ) from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"{name} has arguments={arguments!r}, which is not an object from argument names to "
            "values: give one."
        )
    checked = {"type": "function", "function": {**function, "arguments": dict(arguments)}}
    return checked if call.get("id") is None else {"id": call["id"], **checked}


def _check_results(messages: list[Message]) -> None:
    """Every result answers a call of the assistant's message before it, and no call is left out."""
    open_calls = 0
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            if not open_calls:
                raise ValueError(
                    f"messages[{i}] is the result of no call: a tool message follows the "
                    "assistant's message with its tool_calls, one for each call."
                )
            open_calls -= 1
            continue
        if open_calls:
            raise ValueError(
                f"messages[{i}] comes before the results of {open_calls} tool calls: give a tool "
                "message for each call first."
            )
        open_calls = len(message.get("tool_calls", ()))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
