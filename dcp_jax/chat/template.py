"""A chat as the prompt that the model was trained on.

`render_chat` checks the messages, then renders them by the checkpoint's chat template (Jinja, in a
sandbox with what Hugging Face's templates expect) or, without one, by the model's own format in
`glm.py` or `deepseek.py`. The prompt has the model's BOS already: encode it with
`add_special_tokens=False`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dcp_jax.chat import deepseek, glm
from dcp_jax.chat.messages import Message, check_messages, check_tools
from dcp_jax.json_files import read_object

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
# What a template gets in any case, so that no keyword may set it.
_GIVEN = ("messages", "tools", "add_generation_prompt")


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None,
    model_type: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    tokens: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt of a chat.

    Args:
        messages: OpenAI's form; content is text, or a list of {"type": "text"} parts.
        template: the checkpoint's chat template; None for the model's own format.
        model_type: of the checkpoint's config.json.
        tools: functions that the model may call, in OpenAI's form.
        add_generation_prompt: end with the beginning of the assistant's answer.
        tokens: names of special tokens for the template, as `load_template_tokens` returns them.
        **kwargs: the template's own switches (`enable_thinking=False`); None is as if not given.

    Raises:
        ValueError: messages or tools are malformed, a switch is unknown, or the template fails.
    """
    checked, listed = check_messages(messages), check_tools(tools)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if model_type == "glm_moe_dsa":
        # GLM's templates know no developer, and would leave the message out without a word
        checked = [_as_system(m) if m["role"] == "developer" else m for m in checked]
    if template is not None:
        return _by_template(template, checked, listed, add_generation_prompt, tokens or {}, kwargs)
    if model_type not in _FORMATS:
        raise ValueError(
            f"model_type={model_type!r} has no message format here, and the checkpoint has no chat "
            "template: give template=, or a prompt instead of messages."
        )
    render, switches = _FORMATS[model_type]
    _check_switches(kwargs, switches)
    for name in set(kwargs) - {"reasoning_effort"}:
        if not isinstance(kwargs[name], bool):
            raise ValueError(f"{name}={kwargs[name]!r} is not a switch: give True or False.")
    return render(checked, listed, add_generation_prompt, **kwargs)


def load_chat_template(directory: str | PathLike[str]) -> str | None:
    """The chat template of a checkpoint directory, or None if it has none.

    Raises:
        ValueError: the tokenizer's config has one that is not text.
    """
    path = Path(directory) / _TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_object(Path(directory) / _CONFIG_FILE).get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default", template)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{Path(directory) / _CONFIG_FILE} has a chat_template that is neither text nor a list "
            f"with one named default: put the template into {_TEMPLATE_FILE}."
        )
    return template


def load_template_tokens(directory: str | PathLike[str]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like of a checkpoint directory, for its template."""
    config = read_object(Path(directory) / _CONFIG_FILE)
    named = {
        name: token.get("content") if isinstance(token, Mapping) else token
        for name, token in config.items()
        if name.endswith("_token")
    }
    return {name: token for name, token in named.items() if isinstance(token, str)}


def _by_template(
    template: str,
    messages: list[Message],
    tools: list[dict[str, Any]],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
    kwargs: Mapping[str, Any],
) -> str:
    compiled, names = _compile(template)
    _check_switches(kwargs, tuple(sorted(names - {*_GIVEN, *tokens})))
    try:
        return compiled.render(
            **tokens,
            **kwargs,
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template is a program: it may fail in any way
        raise ValueError(
            f"the chat template refuses these messages ({type(error).__name__}: {error}): change "
            "them, or give another template."
        ) from error


@lru_cache(maxsize=8)
def _compile(template: str) -> tuple[Template, frozenset[str]]:
    """The template, and the names that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
        return environment.from_string(template), frozenset(names)
    except TemplateError as error:
        raise ValueError(
            f"the chat template is not valid Jinja ({error}): correct it, or give another template."
        ) from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training: here, its body and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own would escape for HTML, which the models have never seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"}


def _check_switches(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = {name: value for name, value in kwargs.items() if name not in known}
    if unknown:
        given = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise ValueError(
            f"{given}: the chat template reads no such name, so that it would change nothing; "
            f"leave it out, or use one of those that it reads: {', '.join(known) or 'none'}."
        )


_FORMATS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "glm_moe_dsa": (glm.render, ("enable_thinking", "clear_thinking", "reasoning_effort")),
    "deepseek_v32": (deepseek.render, ("enable_thinking", "thinking")),
}
