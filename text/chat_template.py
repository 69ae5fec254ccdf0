"""Prompts to token ids: chat messages through the model's template, and raw prompts.

Called by the router, off the event loop. Control tokens come from the template alone: what people typed
inside a message never becomes one. A raw prompt is the model's input itself, and may hold them.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import InvalidRequest, ModelError
from text.metadata import ModelMetadata
from text.tokenizer import Tokenizer

# A template is a program that reads what callers send: with odd messages any of these can happen.
_RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """One model's prompts. Immutable; methods may be called from any thread.

    Raises ModelError when the model's template is not valid.
    """

    def __init__(self, metadata: ModelMetadata, tokenizer: Tokenizer) -> None:
        self._metadata = metadata
        self._tokenizer = tokenizer
        literals = sorted(tokenizer.control_literals, key=len, reverse=True)
        self._control = re.compile("(" + ("|".join(map(re.escape, literals)) or r"(?!)") + ")")
        try:
            source = metadata.chat_template
            self._template = None if source is None else _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template of {metadata.name} is not valid: {error}") from error

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins. BOS only if the template writes it.

        `messages` have been validated: known roles, text contents. Raises InvalidRequest when the template
        refuses them (with its own message), or when the model has no template.
        """
        private = _Private(self._control)
        rendered = self._render([{key: private.hide(value) for key, value in m.items()} for m in messages])
        ids: list[int] = []
        ours = ""  # text in which control tokens are the template's; all of it, when nobody typed one
        for piece in self._control.split(rendered):
            typed = private.reveal(piece)
            if typed == piece:
                ours += piece
                continue
            ids += self._tokenizer.encode(ours, control_tokens=True)
            ids += self._tokenizer.encode(typed, control_tokens=False)
            ours = ""
        return ids + self._tokenizer.encode(ours, control_tokens=True)

    def completion_ids(self, text: str) -> list[int]:
        """Ids of a raw prompt, with exactly one BOS where the model wants one."""
        ids = self._tokenizer.encode(text, control_tokens=True)
        bos = self._metadata.bos_id
        return [bos, *ids] if self._metadata.add_bos and bos is not None and ids[:1] != [bos] else ids

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            raise InvalidRequest(f"the model {self._metadata.name} has no chat template", param="messages")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self._metadata.bos_token,
                eos_token=self._metadata.eos_token,
                tools=None,
                documents=None,
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error


class _Private:
    """Swaps control literals that people typed for names that nobody can guess, and back.

    The names are digits and dots, which templates trim, escape and change the case of without harm. Only
    literals are swapped, so a template sees every other character of a message.
    """

    def __init__(self, control: re.Pattern[str]) -> None:
        nonce = str(secrets.randbits(128))
        self._control = control
        self._name = re.compile(rf"{nonce}\.(\d+)\.")
        self._nonce = nonce
        self._literals: list[str] = []

    def hide(self, text: str) -> str:
        return self._control.sub(self._swap, text)

    def reveal(self, text: str) -> str:
        return self._name.sub(lambda name: self._literals[int(name[1])], text)

    def _swap(self, literal: re.Match[str]) -> str:
        self._literals.append(literal[0])
        return f"{self._nonce}.{len(self._literals) - 1}."


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face models expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now(UTC).strftime(layout)
