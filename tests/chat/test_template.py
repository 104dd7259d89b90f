"""Chats as prompts: the models' own formats, templates, and what is refused."""

# ruff: noqa: RUF001  (the bar in the names of DeepSeek's tokens is a full-width one)

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcp_jax.chat import load_chat_template, load_template_tokens, render_chat

GLM, DEEPSEEK = "glm_moe_dsa", "deepseek_v32"

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!"}
THOUGHT = {"role": "assistant", "content": "Hello!", "reasoning_content": "Greet."}
MORE = {"role": "user", "content": "More"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Zürich's <b>weather</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}


def call(name: str, arguments: Any, **keys) -> dict[str, Any]:
    return {**keys, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*listed: dict[str, Any], **message) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(listed), **message}


def result(content: str, **keys) -> dict[str, Any]:
    return {"role": "tool", "content": content, **keys}


CALLED = calls(
    call("weather", '{"city": "Zürich", "days": 3, "units": ["C", null]}', id="c1"),
    call("time", {}),
    reasoning_content="Look it up.",
)
RESULTS = [result("sunny", tool_call_id="c1"), result("noon")]


@dataclass(frozen=True)
class Case:
    id: str
    messages: list[dict[str, Any]]
    prompt: str
    options: dict[str, Any] = field(default_factory=dict)


OFF = {"enable_thinking": False}
ON = {"enable_thinking": True}
HIGH = {"reasoning_effort": "high"}
NO_PROMPT = {"add_generation_prompt": False}

GLM_TOOLS = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n%s\n"
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
    "<arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key>"
    "<arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
WHOLE_TOOL = (
    '{"type": "function", "function": {"name": "weather", "description": '
    '"Zürich\'s <b>weather</b>", "parameters": {"type": "object", "properties": {"city": '
    '{"type": "string"}}}, "strict": true}}'
)
SHOWN_TOOL = (
    '{"name": "weather", "description": "Zürich\'s <b>weather</b>", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}'
)
GLM_CALLS = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value>"
    '<arg_key>units</arg_key><arg_value>["C", null]</arg_value></tool_call>'
    "<tool_call>time</tool_call>"
)
GLM_RESULTS = (
    "<|observation|><tool_response>sunny</tool_response><tool_response>noon</tool_response>"
)

GLM_CASES = [
    Case("user", [HI], "[gMASK]<sop><|user|>Hi<|assistant|><think>"),
    Case("no thinking", [HI], "[gMASK]<sop><|user|>Hi<|assistant|></think>", OFF),
    Case("no generation prompt", [HI], "[gMASK]<sop><|user|>Hi", NO_PROMPT),
    Case(
        "system",
        [SYSTEM, HI],
        "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|><think>",
    ),
    Case(
        "developer is system",
        [{**SYSTEM, "role": "developer"}, HI],
        "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|><think>",
    ),
    Case(
        "earlier reasoning is dropped",
        [HI, THOUGHT, MORE],
        "[gMASK]<sop><|user|>Hi<|assistant|></think>Hello!<|user|>More<|assistant|><think>",
    ),
    Case(
        "earlier reasoning is kept when asked",
        [HI, THOUGHT, MORE],
        "[gMASK]<sop><|user|>Hi<|assistant|><think>Greet.</think>Hello!<|user|>More"
        "<|assistant|><think>",
        {"clear_thinking": False},
    ),
    Case(
        "reasoning in the text",
        [HI, {"role": "assistant", "content": "<think>\nGreet.\n</think>\n\nHello!"}],
        "[gMASK]<sop><|user|>Hi<|assistant|><think>Greet.</think>Hello!",
        NO_PROMPT,
    ),
    Case(
        "tools",
        [SYSTEM, HI],
        f"[gMASK]<sop>{GLM_TOOLS % WHOLE_TOOL}<|system|>Be brief.<|user|>Hi<|assistant|><think>",
        {"tools": [WEATHER]},
    ),
    Case(
        "calls and results",
        [HI, CALLED, *RESULTS],
        f"[gMASK]<sop><|user|>Hi<|assistant|><think>Look it up.</think>{GLM_CALLS}{GLM_RESULTS}"
        "<|assistant|><think>",
    ),
    Case(
        "calls of an earlier turn",
        [HI, CALLED, *RESULTS, HELLO, MORE],
        f"[gMASK]<sop><|user|>Hi<|assistant|></think>{GLM_CALLS}{GLM_RESULTS}"
        "<|assistant|></think>Hello!<|user|>More<|assistant|><think>",
    ),
    Case(
        "5.2",
        [SYSTEM, HI],
        "[gMASK]<sop><|system|>Reasoning Effort: High<|system|>Be brief.<|user|>Hi"
        "<|assistant|><think>",
        HIGH,
    ),
    Case(
        "5.2, no thinking",
        [HI],
        "[gMASK]<sop><|user|>Hi<|assistant|><think></think>",
        {"reasoning_effort": "max", **OFF},
    ),
    Case(
        "5.2, an answer without reasoning",
        [HI, THOUGHT, MORE],
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think></think>Hello!"
        "<|user|>More<|assistant|><think>",
        {"reasoning_effort": "max"},
    ),
    Case(
        "5.2, tools",
        [HI],
        f"[gMASK]<sop><|system|>Reasoning Effort: High{GLM_TOOLS % SHOWN_TOOL}<|user|>Hi"
        "<|assistant|><think>",
        {"tools": [WEATHER], **HIGH},
    ),
]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
DEEPSEEK_TOOLS = f"""

## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part \
of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{SHOWN_TOOL[:-1]}, "strict": true}}
</functions>
"""
DEEPSEEK_CALLS = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
<｜DSML｜parameter name="units" string="false">["C", null]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="time">

</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>"""
DEEPSEEK_RESULTS = (
    "\n\n<function_results>\n<result>sunny</result>\n<result>noon</result>\n</function_results>"
)

DEEPSEEK_CASES = [
    Case("user", [HI], f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"),
    Case("thinking", [HI], f"{BOS}<｜User｜>Hi<｜Assistant｜><think>", ON),
    Case("its other name", [HI], f"{BOS}<｜User｜>Hi<｜Assistant｜><think>", {"thinking": True}),
    Case("no generation prompt", [HI], f"{BOS}<｜User｜>Hi", NO_PROMPT),
    Case("system", [SYSTEM, HI], f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>"),
    Case(
        "developer",
        [{"role": "developer", "content": "Search"}],
        f"{BOS}<｜User｜>\n\n# The user's message is: Search<｜Assistant｜></think>",
    ),
    Case(
        "earlier reasoning is dropped",
        [HI, THOUGHT, MORE],
        f"{BOS}<｜User｜>Hi<｜Assistant｜></think>Hello!{EOS}<｜User｜>More<｜Assistant｜><think>",
        ON,
    ),
    Case(
        "the last answer with reasoning",
        [HI, THOUGHT],
        f"{BOS}<｜User｜>Hi<｜Assistant｜><think>Greet.</think>Hello!{EOS}",
        {**ON, **NO_PROMPT},
    ),
    Case(
        "the last answer without thinking",
        [HI, THOUGHT],
        f"{BOS}<｜User｜>Hi<｜Assistant｜></think>Hello!{EOS}",
        NO_PROMPT,
    ),
    Case(
        "tools",
        [SYSTEM, HI],
        f"{BOS}Be brief.{DEEPSEEK_TOOLS}<｜User｜>Hi<｜Assistant｜></think>",
        {"tools": [WEATHER]},
    ),
    Case(
        "tools without a system message",
        [HI],
        f"{BOS}{DEEPSEEK_TOOLS}<｜User｜>Hi<｜Assistant｜></think>",
        {"tools": [WEATHER]},
    ),
    Case(
        "calls and results",
        [HI, CALLED, *RESULTS],
        f"{BOS}<｜User｜>Hi<｜Assistant｜><think>Look it up.</think>{DEEPSEEK_CALLS}"
        f"{DEEPSEEK_RESULTS}\n\n<think>",
        ON,
    ),
    Case(
        "results without a generation prompt",
        [HI, CALLED, *RESULTS],
        f"{BOS}<｜User｜>Hi<｜Assistant｜></think>{DEEPSEEK_CALLS}{DEEPSEEK_RESULTS}",
        NO_PROMPT,
    ),
    Case(
        "calls of an earlier turn",
        [HI, CALLED, *RESULTS, HELLO, MORE],
        f"{BOS}<｜User｜>Hi<｜Assistant｜></think>{DEEPSEEK_CALLS}{DEEPSEEK_RESULTS}\n\n</think>"
        f"Hello!{EOS}<｜User｜>More<｜Assistant｜><think>",
        ON,
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in GLM_CASES])
def test_glm(case: Case):
    assert render_chat(case.messages, template=None, model_type=GLM, **case.options) == case.prompt


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in DEEPSEEK_CASES])
def test_deepseek(case: Case):
    prompt = render_chat(case.messages, template=None, model_type=DEEPSEEK, **case.options)
    assert prompt == case.prompt


# GLM-5's format once more, in the language of templates.
GLM_TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}
    {{- tools_before }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- tools_after }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
    {%- if m.role in ('system', 'user') %}
        {{- '<|' ~ m.role ~ '|>' ~ m.content }}
        {%- continue %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' }}
        {{- '<tool_response>' ~ m.content ~ '</tool_response>' }}
        {%- continue %}
    {%- endif %}
    {%- set think = m.reasoning_content %}
    {%- set content = m.content %}
    {%- if think is not defined and '</think>' in content %}
        {%- set think = content.split('</think>')[0].split('<think>')[1] %}
        {%- set content = content.split('</think>')[1] %}
    {%- endif %}
    {%- generation %}
        {{- '<|assistant|>' }}
        {%- if think and (loop.index0 > last.user or clear_thinking is false) %}
            {{- '<think>' ~ think.strip() }}
        {%- endif %}
        {{- '</think>' ~ content.strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' ~ call.function.name }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' }}
                {{- v if v is string else v | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' ~ ('</think>' if enable_thinking is false else '<think>') }}
{%- endif %}
"""


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.id) for c in GLM_CASES if not c.id.startswith("5.2")]
)
def test_a_template_of_the_same_effect(case: Case):
    before, after = GLM_TOOLS.split("%s\n")
    template = GLM_TEMPLATE.replace("tools_before", repr(before)).replace(
        "tools_after", repr(after)
    )
    prompt = render_chat(case.messages, template=template, model_type=GLM, **case.options)
    assert prompt == case.prompt


def by_template(template: str, messages=(HI,), **options) -> str:
    return render_chat(list(messages), template=template, model_type=GLM, **options)


def test_what_templates_find():
    """Hugging Face's names, blocks trimmed, JSON without escapes for HTML."""
    assert by_template("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert by_template("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )
    assert re.fullmatch(r"\d{4}-\d\d", by_template("{{ strftime_now('%Y-%m') }}"))
    assert by_template("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert by_template(
        "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert by_template("{{ tools is none }} {{ add_generation_prompt }}") == "True True"
    assert by_template("{{ bos_token }}|", tokens={"bos_token": "<s>"}) == "<s>|"
    assert by_template("{{ bos_token }}|") == "|"


def test_templates_get_one_shape():
    """Text content, arguments as a dict, nothing for what is None."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {**CALLED, "refusal": None, "annotations": None},
        *RESULTS,
        {"role": "assistant", "content": "c", "reasoning": "r", "tool_calls": []},
    ]
    assert json.loads(by_template("{{ messages | tojson }}", messages)) == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Look it up.",
            "tool_calls": [
                call("weather", {"city": "Zürich", "days": 3, "units": ["C", None]}, id="c1"),
                call("time", {}),
            ],
        },
        *RESULTS,
        {"role": "assistant", "content": "c", "reasoning_content": "r"},
    ]


@pytest.mark.parametrize("model_type", [GLM, DEEPSEEK])
def test_content_in_parts(model_type: str):
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    whole, split = (
        render_chat([{"role": "user", "content": c}], template=None, model_type=model_type)
        for c in ("Be brief.", parts)
    )
    assert whole == split


def test_a_messages_dict_is_left_alone():
    messages = [HI, json.loads(json.dumps(CALLED)), *RESULTS]
    before = json.dumps(messages)
    render_chat(messages, template=None, model_type=GLM)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ ('{0.__class__.__mro__}').format(1).x.y }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_templates_do_not_leave_their_sandbox(template: str):
    with pytest.raises(ValueError, match="the chat template refuses these messages"):
        by_template(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role.*change them"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% for %}", "not valid Jinja.*correct it"),
    ],
)
def test_templates_that_fail(template: str, message: str):
    with pytest.raises(ValueError, match=message):
        by_template(template)


def test_switches_of_a_template():
    template = "{% set clear = clear if clear is defined else 0 %}{{ clear }}{{ other }}"
    assert by_template(template, clear=1) == "1"
    assert by_template(template, clear=None) == "0"
    with pytest.raises(ValueError, match="think=True: .*reads no such name.*: clear, other"):
        by_template(template, think=True)
    with pytest.raises(ValueError, match="x=1: .*that it reads: none"):
        by_template("a", x=1)


@dataclass(frozen=True)
class Refusal:
    id: str
    messages: Any
    message: str
    options: dict[str, Any] = field(default_factory=dict)


def user(content: Any, **keys) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **keys}]


REFUSALS = [
    Refusal("no messages", [], r"messages=\[\] says nothing: give at least one"),
    Refusal("text", "Hi", "messages='Hi' is not a list: give"),
    Refusal("one message", HI, "is not a list: give"),
    Refusal("a text for a message", ["Hi"], r"messages\[0\]='Hi' is not a message: give"),
    Refusal("no role", [{"content": "Hi"}], r"messages\[0\] has role=None: roles are system"),
    Refusal("unknown role", [{**HI, "role": "bot"}], "role='bot': roles are system, developer"),
    Refusal("no content", [HI, {"role": "user"}], r"messages\[1\] has no content: give text"),
    Refusal("null content", user(None), "has no content"),
    Refusal("answer without content", [HI, {"role": "assistant"}], "has no content"),
    Refusal("number", user(3), r"messages\[0\].content=3 is not text: give a string or a list"),
    Refusal(
        "image",
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        r"messages\[0\].content\[0\]=.*image_url.*reads nothing else: give",
    ),
    Refusal("text part without text", user([{"type": "text"}]), r"content\[0\]=.*give"),
    Refusal("unknown key", user("Hi", weight=1), "has {'weight': 1}, which has no place"),
    Refusal("name", user("Hi", name=3), "name=3, which is not text: give a string"),
    Refusal("calls of a user", user("Hi", tool_calls=[call("f", {})]), "only an assistant calls"),
    Refusal("calls not listed", [HI, calls() | {"tool_calls": {"a": 1}}], "is not a list: give"),
    Refusal("call without function", [HI, calls({"id": "x"})], r"tool_calls\[0\]=.*no function"),
    Refusal("call without name", [HI, calls(call("", {}))], "names no function: give"),
    Refusal("arguments not JSON", [HI, calls(call("f", "{x"))], "arguments='{x'.*not JSON.*give"),
    Refusal("arguments a list", [HI, calls(call("f", "[1]"))], r"arguments=\[1\].*not an object"),
    Refusal("result of no call", [HI, result("x")], r"messages\[1\] is the result of no call"),
    Refusal("more results", [HI, CALLED, *RESULTS, result("x")], "the result of no call"),
    Refusal(
        "fewer results", [HI, CALLED, RESULTS[0], MORE], "before the results of 1 tool calls: give"
    ),
    Refusal("tools not listed", [HI], "tools=.* is not a list", {"tools": WEATHER}),
    Refusal(
        "a tool without a name",
        [HI],
        r"tools\[0\]={'type': 'function'} is not a function with a name: give",
        {"tools": [{"type": "function"}]},
    ),
    Refusal(
        "a tool of another type", [HI], r"tools\[0\]=", {"tools": [{**WEATHER, "type": "mcp"}]}
    ),
    Refusal(
        "unknown switch",
        [HI],
        "thinkin=True: .*it reads: enable_thinking",
        {"thinkin": True},
    ),
    Refusal(
        "not a switch",
        [HI],
        "enable_thinking='no' is not a switch: give",
        {"enable_thinking": "no"},
    ),
    Refusal(
        "model type",
        [HI],
        "model_type='llama' has no message format.*give",
        {"model_type": "llama"},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in REFUSALS])
def test_refused(case: Refusal):
    for model_type in (GLM, DEEPSEEK):
        with pytest.raises(ValueError, match=case.message):
            render_chat(
                case.messages, **{"template": None, "model_type": model_type, **case.options}
            )


def test_refused_by_a_format():
    with pytest.raises(ValueError, match="reasoning_effort='low' is not a level of GLM-5.2: use"):
        render_chat([HI], template=None, model_type=GLM, reasoning_effort="low")
    with pytest.raises(ValueError, match="role='assistant'.*pass add_generation_prompt=False"):
        render_chat([HI, HELLO], template=None, model_type=DEEPSEEK)


def test_load_chat_template(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert load_template_tokens(tmp_path) == {}
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for stored, template in (("x", "x"), (named, "d"), (None, None)):
        config.write_text(json.dumps({"chat_template": stored}))
        assert load_chat_template(str(tmp_path)) == template
    for stored in (3, named[:1]):
        config.write_text(json.dumps({"chat_template": stored}))
        with pytest.raises(ValueError, match="neither text nor a list.*put the template into"):
            load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("é")
    assert load_chat_template(tmp_path) == "é"


def test_load_template_tokens(tmp_path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    assert load_template_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
