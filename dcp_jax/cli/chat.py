"""`dcp-jax chat`: a conversation in the terminal, answers as they are generated."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import arg

from dcp_jax.cli.engine import EngineArgs
from dcp_jax.cli.sampling import SamplingArgs

# The model's text as it is: no markup, no emoji names, no colours of numbers.
PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
HELP = "Type a message; /reset starts over, /exit (or the end of the input) leaves."


@dataclasses.dataclass(frozen=True)
class Chat:
    """Talk to a model in the terminal."""

    engine: Annotated[EngineArgs, arg(name="")]
    sampling: Annotated[SamplingArgs, arg(name="")]
    system: str | None = None
    """A system message that opens the conversation."""
    message: str | None = None
    """Answer this one message and leave."""
    enable_thinking: bool | None = None
    """Whether the model reasons before it answers; default: what its chat template does."""

    def run(self, console: Console) -> None:
        """Load the model and talk."""
        self.sampling.check()
        llm = self.engine.load([], generate=1, needs_tokenizer=True)
        defaults = dataclasses.replace(llm.default_sampling_params(), max_tokens=None)
        params = dataclasses.replace(defaults, **self.sampling.given())
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages = list(opening)
        if self.message is None:
            console.print(HELP, style="dim")
        for text in [self.message] if self.message is not None else _typed(console):
            if text == "/reset":
                messages = list(opening)
                console.print("The conversation starts over.", style="dim")
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = self._answer(llm, messages, params, console)
            except ValueError as error:
                if self.message is not None:
                    raise
                # A message too long for the context ends neither the program nor the conversation.
                messages.pop()
                console.print(f"{error}", style="red", **PLAIN)
                continue
            messages.append({"role": "assistant", "content": answer})

    def _answer(self, llm, messages: list[dict], params, console: Console) -> str:
        """Stream one answer to the terminal; Ctrl-C ends the answer, not the program."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        prompt = llm.chat_prompt(messages, **thinking)
        text = ""
        try:
            for piece in llm.stream(prompt, params):
                console.print(piece.text, end="", soft_wrap=True, **PLAIN)
                text += piece.text
        except KeyboardInterrupt:
            if self.message is not None:
                raise
        console.print()
        return text


def _typed(console: Console) -> Iterator[str]:
    """Messages from the terminal, blank lines left out."""
    while True:
        try:
            text = console.input("[bold]> [/]").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text:
            yield text
