"""The message format of GLM-5, and of GLM-5.2 when a reasoning effort is given.

    [gMASK]<sop><|system|>...<|user|>...<|assistant|><think>reasoning</think>answer
    <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>
    <|observation|><tool_response>...</tool_response>

No token ends a message: the next role's does. Reasoning is shown only of the turns since the last
user message, unless `clear_thinking=False`. GLM-5.2 differs in three things: a first system line
`Reasoning Effort: Max`, an empty `<think></think>` where GLM-5 writes `</think>` alone, and tools
listed without their {"type": "function"} wrapper.
"""

from collections.abc import Sequence
from typing import Any

from dcp_jax.chat.messages import Message, last_user_index, split_reasoning, to_json

EFFORTS = ("high", "max")

_TOOLS_BEFORE = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"
    "{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>"
    "...</tool_call>"
)
# Switches of a tool for the serving side, which the model does not see.
_NOT_SHOWN = ("defer_loading", "strict")


def render(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
    *,
    enable_thinking: bool = True,
    clear_thinking: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The prompt of a checked chat.

    Args:
        messages: as `check_messages` returns them.
        tools: as `check_tools` returns them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        enable_thinking: let the model reason before it answers.
        clear_thinking: drop the reasoning of earlier turns.
        reasoning_effort: "high" or "max", for GLM-5.2's format; None is GLM-5's.
    """
    if reasoning_effort not in (None, *EFFORTS):
        raise ValueError(
            f"reasoning_effort={reasoning_effort!r} is not a level of GLM-5.2: use "
            f"{' or '.join(EFFORTS)}, or none for GLM-5."
        )
    glm52 = reasoning_effort is not None
    no_reasoning = "<think></think>" if glm52 else "</think>"
    parts = ["[gMASK]<sop>"]
    if reasoning_effort is not None and enable_thinking:
        parts.append(f"<|system|>Reasoning Effort: {reasoning_effort.capitalize()}")
    if tools:
        parts += ["<|system|>", _TOOLS_BEFORE, *_listed(tools, glm52), _TOOLS_AFTER]
    last_user = last_user_index(messages)
    before = None
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            shown = i > last_user or not clear_thinking
            parts += ["<|assistant|>", *_assistant(message, shown, glm52, no_reasoning)]
        elif role == "tool":
            parts += ["<|observation|>"] if before != "tool" else []
            parts.append(f"<tool_response>{message['content']}</tool_response>")
        else:  # a developer's word is the system's here
            parts += ["<|user|>" if role == "user" else "<|system|>", message["content"]]
        before = role
    if add_generation_prompt:
        parts += ["<|assistant|>", "<think>" if enable_thinking else no_reasoning]
    return "".join(parts)


def _assistant(message: Message, shown: bool, glm52: bool, no_reasoning: str) -> list[str]:
    reasoning, content = split_reasoning(message)
    reasoning = reasoning if glm52 else reasoning.strip()
    parts = [f"<think>{reasoning}</think>" if shown and reasoning else no_reasoning]
    parts.append(content.strip())
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(f"<tool_call>{function['name']}")
        for key, value in function["arguments"].items():
            text = value if isinstance(value, str) else to_json(value)
            parts.append(f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>")
        parts.append("</tool_call>")
    return parts


def _listed(tools: Sequence[dict[str, Any]], glm52: bool) -> list[str]:
    """One line for each tool."""
    if not glm52:
        return [to_json(tool) + "\n" for tool in tools]
    functions = [tool["function"] for tool in tools]
    return [
        to_json({key: value for key, value in f.items() if key not in _NOT_SHOWN}) + "\n"
        for f in functions
        if not f.get("defer_loading")
    ]
