"""The message format of DeepSeek-V3.2, which ships no chat template.

    BOS system <｜User｜>question<｜Assistant｜><think>reasoning</think>answer EOS
    <｜DSML｜function_calls> ... </｜DSML｜function_calls> EOS
    <function_results> <result>...</result> </function_results> <think>...

Each answer is opened by `<think>` where the model is to reason, else by `</think>`. Only the turns
since the last user message are opened by `<think>`: earlier reasoning is dropped. Tools are
described at the end of a system message that comes first, or in its place. A developer message is a
kind of user message here.
"""

# ruff: noqa: RUF001, RUF002  (the bar in the names of the tokens is a full-width one)

from collections.abc import Sequence
from typing import Any

from dcp_jax.chat.messages import Message, last_user_index, split_reasoning, to_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
DSML = "｜DSML｜"

_TOOLS = f"""\
## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of \
your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
_USERS = ("user", "developer")


def render(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
    *,
    enable_thinking: bool = False,
    thinking: bool = False,
) -> str:
    """The prompt of a checked chat.

    Args:
        messages: as `check_messages` returns them.
        tools: as `check_tools` returns them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        enable_thinking: let the model reason before it answers.
        thinking: another name of the same.

    Raises:
        ValueError: an answer is asked for, but not after a message of a user or of a tool.
    """
    thinking = thinking or enable_thinking
    last = messages[-1]["role"]
    if add_generation_prompt and last not in (*_USERS, "tool"):
        raise ValueError(
            f"the last message has role={last!r}, and the format opens an answer only after one of "
            "a user or a tool: add one, or pass add_generation_prompt=False."
        )
    parts = [BOS]
    described = messages[0]["role"] == "system"
    if tools and not described:
        parts.append(_tools(tools))
    last_user = last_user_index(messages, _USERS)
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        after = messages[i + 1]["role"] if i + 1 < len(messages) else None
        opener = "<think>" if thinking and i >= last_user else "</think>"
        opens = after is not None or add_generation_prompt
        if role == "system":
            parts.append(content)
            if tools and described and i == 0:
                parts.append(_tools(tools))
        elif role in _USERS:
            said = f"\n\n# The user's message is: {content}" if role == "developer" else content
            parts += [USER, said, ASSISTANT + opener if opens else ""]
        elif role == "tool":
            first = messages[i - 1]["role"] != "tool"
            parts += ["\n\n<function_results>" if first else "", f"\n<result>{content}</result>"]
            if after != "tool":
                parts += ["\n</function_results>", f"\n\n{opener}" if opens else ""]
        else:
            parts += [*_assistant(message, thinking and i > last_user), EOS]
    return "".join(parts)


def _assistant(message: Message, thinking: bool) -> list[str]:
    reasoning, content = split_reasoning(message)
    parts = [f"{reasoning}</think>" if thinking else "", content]
    if "tool_calls" in message:
        parts.append(f"\n\n<{DSML}function_calls>\n")
        parts += [_invoke(call["function"]) for call in message["tool_calls"]]
        parts.append(f"</{DSML}function_calls>")
    return parts


def _invoke(function: dict[str, Any]) -> str:
    parameters = "\n".join(
        f'<{DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else to_json(value)}</{DSML}parameter>"
        for key, value in function["arguments"].items()
    )
    return f'<{DSML}invoke name="{function["name"]}">\n{parameters}\n</{DSML}invoke>\n'


def _tools(tools: Sequence[dict[str, Any]]) -> str:
    listed = "\n".join(to_json(tool["function"]) for tool in tools)
    return f"\n\n{_TOOLS}{listed}\n</functions>\n"
