"""Chats as prompts: templates, and the models' own message formats."""

from dcp_jax.chat.template import load_chat_template, load_template_tokens, render_chat

__all__ = ["load_chat_template", "load_template_tokens", "render_chat"]
