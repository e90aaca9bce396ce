"""One prompt -> token ids, by the tokenizer's own chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import InputError

if TYPE_CHECKING:
    from mismatch_audit.prompts import Prompt


def token_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of the prompt. Raises InputError when the tokenizer cannot render or encode it.

    A rendered conversation already holds the template's own BOS, so none is added to it.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    messages = prompt.messages
    if messages is None and prompt.template == "chat" and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt.prompt or ""}]
    if messages is not None:
        ids = _encode(tokenizer, _render(messages, tokenizer), add_special_tokens=False)
    else:
        text = prompt.prompt or ""
        written = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = _encode(tokenizer, text, add_special_tokens=not written)
    if not ids:
        raise InputError(f"prompt {prompt.id!r} has no tokens")
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise InputError(
            f"prompt {prompt.id!r} begins with two BOS tokens",
            fix="remove the BOS from the text or from the chat template",
        )
    return ids


def _render(messages: list[dict[str, str]], tokenizer: Any) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template, so messages cannot be rendered",
            fix="give prompt instead of messages, or use an instruction-tuned model",
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"the chat template rejects the messages: {error}",
            fix="order the roles as the model's template wants them",
        ) from error
    return str(text)


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]
